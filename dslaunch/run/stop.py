"""End a run from any shell: its supervisor is told, or its job is cancelled, or its recorded processes are ended.

Only recorded processes are touched, each proved to be the recorded one by its start time, and what descends from
them. Nothing is found by a name.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dslaunch.errors import LaunchError
from dslaunch.planfile import plan_from_json
from dslaunch.run import kube
from dslaunch.run.attempts import attempt_of, logs_of
from dslaunch.run.folder import write_file
from dslaunch.run.now import ENDED, KUBERNETES, STOP, Now, here, look, recorded
from dslaunch.run.processes import Process, children_of, end, identify, is_alive, send
from dslaunch.run.records import read_ranks
from dslaunch.run.slurm_jobs import cancel, signal_steps
from dslaunch.run.state import append_event, read_events, read_state, update_state

_GRACE_S = 15.0
_LIMIT_S = 120.0
"""More than a supervisor takes: SIGTERM, 15 s, SIGKILL, and 30 s for what hangs in the kernel."""
_POLL_S = 0.1
_ASK_S = 1.0
_CLEAR_S = 60.0
"""For a job to end its ranks and to remove from its nodes what was staged."""


def stop(folder: Path, echo: Callable[[str], None]) -> None:
    """End the run in `folder`, wait for its end, and say what ended.

    Raises:
        ConfigError: no run folder.
        LaunchError: it runs on another host, or something of it did not end.
    """
    now = look(folder)
    if now.state.launcher == KUBERNETES and now.standing in ("queued", "running", "unknown"):
        _delete(folder, echo)
    elif now.standing == "queued" or (now.job and now.standing in ("running", "unknown")):
        _cancel(folder, now, echo)
    elif now.standing == "running":
        assert now.state.supervisor is not None
        _tell(folder, now.state.supervisor, echo)
    elif now.standing == "unsupervised":
        _end_recorded(folder, echo)
    elif now.standing == "unknown":
        raise LaunchError(
            f"{folder.name}: runs on {now.state.host}, and this is {here()}, where its process ids mean nothing. "
            f"Type there: dslaunch stop {shlex.quote(str(folder))}",
            status=2,
        )
    else:
        echo(f"{folder.name}: {now.standing} already; nothing of it runs here")
        if nodes := _staged_on(folder):
            echo(_left_staged(folder, nodes))
    _name_others(folder, echo)


def _tell(folder: Path, supervisor: Process, echo: Callable[[str], None]) -> None:
    """SIGTERM to the supervisor, which ends the launcher's whole tree and records how."""
    append_event(folder, "stop", by="supervisor", pid=supervisor.pid)
    send(supervisor, signal.SIGTERM)
    _wait_for(lambda: not is_alive(supervisor), f"its supervisor, process {supervisor.pid}")
    echo(f"{folder.name}: {read_state(folder).status}. {_ranks(folder)}")


def _delete(folder: Path, echo: Callable[[str], None]) -> None:
    """Its pods get SIGTERM, and SIGKILL after 30 s (Kubernetes' own terminationGracePeriodSeconds)."""
    job = kube.job_of(folder)
    append_event(folder, "stop", by="kubectl delete", job=job.resource)
    kube.keep_logs(job, logs_of(folder, attempt_of(folder)))
    kube.delete(folder, job)
    update_state(folder, status="stopped")
    append_event(folder, "stopped", exit_status=None, why="dslaunch stop deleted it")
    echo(f"{folder.name}: stopped; {job.resource} is deleted. What its pods said stands in {folder}/logs")


def _cancel(folder: Path, now: Now, echo: Callable[[str], None]) -> None:
    """scancel of the last job of the chain first, lest a cancelled job starts the next."""
    jobs = [now.state.slurm_job, *now.state.continuations]
    append_event(folder, "stop", by="scancel", jobs=jobs)
    if now.standing == "running" and _staged_on(folder):
        _let_it_clear(folder, now.job, [job for job in jobs if job != now.job])
    if look(folder).standing not in ENDED:
        cancel(jobs[::-1])
        _wait_for(lambda: look(folder).standing in ENDED, f"job {now.job}", _ASK_S)
    update_state(folder, status="stopped")
    if nodes := _staged_on(folder):
        echo(_left_staged(folder, nodes))
    echo(f"{folder.name}: stopped; job {', '.join(jobs)} cancelled. {_ranks(folder)}")


def _let_it_clear(folder: Path, job: str, others: list[str]) -> None:
    """End the ranks alone, so that the batch script still removes what was staged: a cancelled job starts no step.

    Args:
        others: jobs of the same chain.
    """
    if others:
        cancel(others[::-1])
    write_file(folder / STOP, "")
    signal_steps(job)
    with contextlib.suppress(LaunchError):  # ranks that do not end are cancelled
        _wait_for(lambda: look(folder).standing in ENDED, f"job {job}", _ASK_S, _CLEAR_S)


def _staged_on(folder: Path) -> str:
    """The nodes of a SLURM job that hold what was staged, as SLURM writes them; empty where none does."""
    told = [event for event in read_events(folder) if event["kind"] in ("staged", "unstaged")]
    return str(told[-1]["details"].get("nodes", "")) if told and told[-1]["kind"] == "staged" else ""


def _left_staged(folder: Path, nodes: str) -> str:
    """What a job that was cancelled left there, and how to remove it."""
    where = folder / "plan.json"
    place = plan_from_json(where.read_text(encoding="utf-8"), str(where)).launcher.stage_to.rstrip("/")
    words = ("srun", f"--nodelist={nodes}", "--ntasks-per-node=1", "bash", f"{folder}/stage.sh", "take")
    return (
        f"{folder.name}: its copy of the code stays on {nodes}: the job was ended before it could remove it. To "
        f"remove it: {shlex.join((*words, f'{place}/{folder.name}'))}"
    )


def _end_recorded(folder: Path, echo: Callable[[str], None]) -> None:
    """The launcher and the ranks that outlived their supervisor, with all that descends from them."""
    append_event(folder, "stop", by="recorded processes")
    known: set[Process] = set()

    def living() -> set[Process]:
        known.update(_with_descendants(recorded(folder, read_state(folder))))
        return {each for each in known if is_alive(each)}

    survivors = end(living, _GRACE_S, hurry=lambda: False)
    update_state(folder, status="stopped")
    if survivors:
        pids = ", ".join(str(each.pid) for each in survivors)
        raise LaunchError(f"{folder.name}: process {pids} lives on after SIGKILL: it hangs in the kernel")
    echo(f"{folder.name}: stopped; {len(known)} processes ended that had lost their supervisor. {_ranks(folder)}")


def _with_descendants(processes: list[Process]) -> set[Process]:
    found: set[Process] = set()
    waiting = list(processes)
    while waiting:
        process = waiting.pop()
        if process not in found and identify(process.pid) == process:
            found.add(process)
            waiting += children_of(process.pid)
    return found


def _wait_for(
    condition: Callable[[], bool], what: str, pause_s: float = _POLL_S, limit_s: float = _LIMIT_S
) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            raise LaunchError(f"{what} did not end within {limit_s:.0f} s. Look at it: dslaunch status")
        time.sleep(pause_s)


def _ranks(folder: Path) -> str:
    """How many ranks recorded their end."""
    records = read_ranks(folder / "ranks")
    ended = [each for each in records if each.status is not None]
    return f"{len(ended)} of {len(records)} ranks recorded how they ended" if records else "No rank had started"


def _name_others(folder: Path, echo: Callable[[str], None]) -> None:
    """Ranks of other hosts that recorded no end: their launcher ends them, which can't be seen from here."""
    unseen = {each.host for each in read_ranks(folder / "ranks") if each.status is None and each.host}
    if others := sorted(unseen - {here()}):
        echo(f"not seen from here: ranks on {', '.join(others[:8])} recorded no end")
