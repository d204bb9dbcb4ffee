"""Triage: repeat a failing run on one process, and say whether the fault is its own or that of many ranks.

    what the run said -> one rank, the same samples, from the same checkpoint -> does it fail alike? -> verdict
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.launch.alone import Alone, planned_alone
from dslaunch.launch.before import PREFLIGHT, can_ask, target_of
from dslaunch.launch.reload import reload_fault
from dslaunch.launch.request import LaunchRequest
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.preflight import preflight
from dslaunch.run.attempts import attempt_of, logs_of
from dslaunch.run.checkpoints import SavedState, checkpoint_dir, newest_checkpoint, saved_before
from dslaunch.run.failure import Failure, failure_of
from dslaunch.run.find import word_for
from dslaunch.run.folder import verify, write_files
from dslaunch.run.now import Now, look
from dslaunch.run.processes import Process
from dslaunch.run.records import furthest, read_ranks
from dslaunch.run.state import read_events
from dslaunch.run.supervise import supervise
from dslaunch.run.verdict import Repeated, Triage, Verdict, judged

_FOLDER = "triage"
_BEYOND = 2
"""Steps behind the one that failed, after which a repetition counts as passed."""


def triage(run_dir: Path, step: int, minutes: float, echo: Callable[[str], None]) -> Triage:
    """Repeat the failed run in `run_dir` on one process.

    Args:
        step: the step that fails, counted from 1; 0: as the run's records tell.
        minutes: limit of the repetition.

    Raises:
        ConfigError: the run has not failed, or was launched without what a plan for one process is made from.
        PlanError: it does not fit one process.
    """
    now = look(run_dir)
    _refuse(run_dir, now)
    files = verify(run_dir)
    plan = plan_from_json(files["plan.json"], str(run_dir / "plan.json"))
    failure = failure_of(run_dir / "ranks", logs_of(run_dir, attempt_of(run_dir)))
    failure = replace(failure, step=step or max(failure.step, _begun_at(plan, run_dir, now)))
    work_dir = Path(now.state.work_dir)
    saved = _start(plan, run_dir, now, failure)
    alone = planned_alone(plan, files, work_dir, saved)
    folder = _new_folder(run_dir)
    echo(f"{run_dir.name}: failed at step {failure.step}; repeated as {alone.words}, from {alone.start}")
    repeated = _repeat(alone, folder, work_dir, failure.step + _BEYOND, minutes)
    if saved and saved.step and alone.start == saved.path.name:
        # Until it has completed a step it is at the first one behind the checkpoint.
        at = max(repeated.failure.step, saved.step + 1)
        repeated = replace(repeated, failure=replace(repeated.failure, step=at))
    findings = _asked(LaunchRequest(plan, files, run_dir, work_dir, os.environ, wait=False), now.state.launcher)
    cause = _cause(run_dir)
    verdict = judged(cause, failure, repeated, findings)
    return _told(run_dir, cause, failure, alone, repeated, findings, verdict, folder)


def _refuse(run_dir: Path, now: Now) -> None:
    if now.standing in ("finished", "prepared", "queued", "running", "unsupervised", "unknown"):
        raise ConfigError(
            f"{run_dir.name}: is {now.standing}, and triage repeats a run that failed. Look: dslaunch status "
            f"{word_for(run_dir)}"
        )


def _cause(run_dir: Path) -> str:
    """Of the run's end; a guard that outlives its supervisor says so in the event of the end alone."""
    ends = [each["details"] for each in read_events(run_dir) if each["kind"] in ("attempt_ended", "failed")]
    causes = [str(each["cause"]) for each in ends if "cause" in each]
    return "" if not causes else "killed" if causes[-1] == "supervisor_lost" else causes[-1]


def _begun_at(plan: Plan, run_dir: Path, now: Now) -> int:
    """The first step of the newest attempt, which may have ended before any rank completed it."""
    saved = newest_checkpoint(checkpoint_dir(plan, run_dir, now.state.work_dir))
    return saved.step + 1 if saved and saved.step and attempt_of(run_dir) > 1 else 1


def _start(plan: Plan, run_dir: Path, now: Now, failure: Failure) -> SavedState | None:
    """The newest checkpoint before the step that failed, where one process reads it."""
    saved = saved_before(checkpoint_dir(plan, run_dir, now.state.work_dir), failure.step)
    return None if saved is None or reload_fault(plan, _one(plan)) else saved


def _one(plan: Plan) -> Plan:
    """The same plan on one replica, as far as reading a checkpoint goes."""
    components = {name: replace(each, dp=1, tp=1, pp=1, cp=1) for name, each in plan.components.items()}
    return replace(plan, components=components)


def _new_folder(run_dir: Path) -> Path:
    number = 1 + sum(1 for _ in (run_dir / _FOLDER).glob("[0-9]*"))
    folder = run_dir / _FOLDER / str(number)
    (folder / "logs").mkdir(parents=True)
    return folder


def _repeat(alone: Alone, folder: Path, work_dir: Path, last: int, minutes: float) -> Repeated:
    """Run it until it has completed step `last`, fails, ends, or the time is over."""
    write_files(folder, alone.files)
    if alone.copied:
        shutil.copytree(alone.copied, folder / "checkpoints")
    request = LaunchRequest(alone.plan, alone.files, folder, work_dir, os.environ, wait=False)
    limit = time.monotonic() + minutes * 60
    reached: list[str] = []

    def watch() -> bool:
        if furthest(read_ranks(folder / "ranks")) >= last:
            reached.append("passed")
        elif time.monotonic() > limit:
            reached.append("out of time")
        return bool(reached)

    env = {**os.environ, **_variables(request, resumes=alone.copied is not None)}
    with open(os.devnull, "wb") as nothing:
        log = folder / "logs" / "launcher.log"
        ended = supervise(["bash", "rank.sh"], folder, env, log, nothing, _started, watch=watch)
    logs = folder / "logs" / ("attempt-2" if alone.copied else "")
    outcome = "stopped" if ended.stopped_by else "failed" if ended.status else "passed"
    return Repeated(reached[0] if reached else outcome, failure_of(folder / "ranks", logs), ended.status)


def _started(process: Process) -> None:
    """Nobody asks after it."""


def _variables(request: LaunchRequest, *, resumes: bool) -> Mapping[str, str]:
    from dslaunch.run.agent import free_port

    place = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    again = {"DSLAUNCH_ATTEMPT": "2"} if resumes else {}
    return {**request.variables(local_python=True), **place, **meeting, **again}


def _asked(request: LaunchRequest, launcher: str) -> tuple[str, ...]:
    """What a launch on the run's hosts would stop at now; nothing where they cannot be asked from here."""
    if PREFLIGHT not in request.files or not can_ask(launcher, os.environ):
        return ()
    target = target_of(request, launcher)
    if not target.preflight.enabled:
        return ()
    report, _ = preflight(target, collective=False)
    return tuple(f"{hit.host}: {hit.check}: {hit.found}" for hit in report.blocking)


def _told(
    run_dir: Path, cause: str, failure: Failure, alone: Alone, repeated: Repeated, findings: tuple[str, ...],
    verdict: Verdict, folder: Path,
) -> Triage:  # fmt: skip
    return Triage(
        run=run_dir.name,
        cause=cause,
        step=failure.step,
        error=str(failure.said[0]) if failure.said else "",
        repeated_as=alone.words,
        repeated_from=alone.start,
        repeated_to=repeated.failure.step - 1,
        repeated_error=str(repeated.failure.said[0]) if repeated.failure.said else "",
        folder=str(folder),
        preflight=findings,
        verdict=verdict.place,
        why=verdict.why,
        next=verdict.next,
    )
