"""A run on this machine: asked after, shown, stopped and resumed from another shell than that of its launch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.now import recorded
from dslaunch.run.processes import Process, identify, is_alive, send
from dslaunch.run.records import furthest, read_ranks
from dslaunch.run.state import State, read_events, read_state, update_state
from tests.launching import HOSTILE
from tests.real.parts import need

need("torch", "deepspeed")

TRAINER = """
import os, sys, time
from pathlib import Path
from dslaunch.progress import resuming, step

rank, run = int(os.environ["RANK"]), Path(os.environ["DSLAUNCH_RUN_DIR"])
steps, fails_at, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
latest = run / "checkpoints" / "latest"
done = int(latest.read_text().removeprefix("step-")) if resuming() and latest.exists() else 0
print(f"rank {rank} of attempt {os.environ['DSLAUNCH_ATTEMPT']} goes on from step {done}", flush=True)
for number in range(done + 1, steps + 1):
    time.sleep(pause)
    if number == fails_at and rank == 1 and not resuming():
        while fails_at > 2 and not latest.exists():
            time.sleep(0.02)  # rank 0 may have started later
        print("what rank 1 says before it fails", flush=True)
        sys.exit(9)
    step(number)
    if rank == 0 and number % 2 == 0:
        (latest.parent / f"step-{number}").mkdir(parents=True, exist_ok=True)
        latest.with_suffix(".new").write_text(f"step-{number}")
        latest.with_suffix(".new").replace(latest)
"""
LOCAL = ["recipe=vla_tiny", "cluster=local", f"launcher.python={sys.executable}"]
LIMIT_S = 300.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A working folder with a hostile name and a trainer in it. What still runs at the end is ended by its pid."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    yield folder
    for run in folder.glob("runs/*"):
        with contextlib.suppress(ValueError):
            state = read_state(run)
            for process in [*recorded(run, state), *([state.supervisor] if state.supervisor else [])]:
                send(process, signal.SIGKILL)


def dslaunch(home: Path, *words: str, status: int = 0) -> str:
    """What the command line prints, both streams, in a shell of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=home,
        env={**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def begin(home: Path, steps: int, fails_at: int = 0, pause: float = 0.1) -> Path:
    """A detached run of the trainer; its folder."""
    words = [*LOCAL, "launcher=torchrun", "module=", "script=train.py", "--detach"]
    dslaunch(home, *words, "--", str(steps), str(fails_at), str(pause))
    return max((home / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def told(home: Path, run: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dslaunch(home, "status", *([run] if run else []), "--json"))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def processes_of(run: Path) -> list[Process]:
    state = read_state(run)
    found = [state.supervisor, state.process, *(each.process for each in read_ranks(run / "ranks"))]
    return [process for process in found if process]


def test_a_detached_run_is_watched_and_stopped_from_another_shell(home: Path) -> None:
    run = begin(home, steps=10_000)
    wait_for(lambda: (told(home)["step"] or 0) >= 5)
    status = told(home)
    assert (status["state"], status["attempt"], status["first_failure"]) == ("running", 1, None)
    assert 0 < status["steps_per_s"] < 11  # files tell their time to some milliseconds
    assert status["progress_age_s"] < 60
    assert [rank["status"] for rank in status["ranks"]] == [None, None]

    frame = dslaunch(home, "watch", "--once")
    assert "running" in frame
    assert re.search(r"^     0 [#-]{2}", frame, re.MULTILINE)
    assert "rank 1 of attempt 1 goes on" in dslaunch(home, "logs", "--rank", "1")
    assert "is running" in dslaunch(home, "resume", run.name, status=2)

    living = processes_of(run)
    assert len(living) == 4
    assert all(map(is_alive, living))
    assert "2 of 2 ranks recorded how they ended" in dslaunch(home, "stop", run.name)
    assert not any(map(is_alive, living))
    assert told(home)["state"] == "stopped"
    assert "stopped already" in dslaunch(home, "stop", run.name)


def test_the_rank_that_failed_first_is_named_and_its_own_log_shown(home: Path) -> None:
    run = begin(home, steps=1000, fails_at=7)
    wait_for(lambda: told(home)["state"] == "failed")
    failure = told(home, run.name)["first_failure"]
    assert (failure["rank"], failure["exit_status"]) == (1, 9)
    assert "exits 9" in told(home)["why"]
    shown = dslaunch(home, "logs", run.name, "--first-error")
    assert "rank 1" in shown.splitlines()[0]
    assert "exits 9" in shown.splitlines()[0]
    assert "what rank 1 says before it fails" in shown
    assert "rank 0 of" not in shown

    resumed = dslaunch(home, "resume", run.name, "--dry-run")
    assert "DSLAUNCH_ATTEMPT=2" in resumed
    assert told(home)["attempt"] == 1
    saved = told(home)["checkpoint"]["step"]
    dslaunch(home, "resume", run.name, "--detach")
    wait_for(lambda: (told(home)["step"] or 0) > saved)
    assert f"rank 0 of attempt 2 goes on from step {saved}" in dslaunch(home, "logs", run.name, "--rank", "0")
    assert "is running" in dslaunch(home, "resume", run.name, status=2)
    dslaunch(home, "stop", run.name)
    status = told(home)
    assert (status["state"], status["attempt"]) == ("stopped", 2)
    assert "goes on from step 0" in dslaunch(home, "logs", run.name, "--rank", "0", "--attempt", "1")
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.index("failed") < kinds.index("attempt") < kinds.index("stop")


def test_a_run_without_a_checkpoint_starts_anew_only_when_told_to(home: Path) -> None:
    run = begin(home, steps=6, fails_at=1)
    wait_for(lambda: told(home)["state"] == "failed")
    (run / "checkpoints").mkdir(exist_ok=True)
    for left in (run / "checkpoints").iterdir():  # rank 0 may have been quick
        left.rmdir() if left.is_dir() else left.unlink()
    assert "no checkpoint in" in dslaunch(home, "resume", run.name, status=2)
    assert "attempt 2, from step 0" in dslaunch(home, "resume", run.name, "--from-scratch")
    assert told(home)["state"] == "finished"
    assert "has finished" in dslaunch(home, "resume", run.name, status=2)


def test_ranks_that_lost_supervisor_and_guard_can_be_stopped(home: Path) -> None:
    run = begin(home, steps=10_000)
    wait_for(lambda: (told(home)["step"] or 0) >= 2)
    supervisor, guard, *others = processes_of(run)
    send(guard, signal.SIGSTOP)  # it would end the ranks itself, once the supervisor is gone
    send(supervisor, signal.SIGKILL)
    send(guard, signal.SIGKILL)
    wait_for(lambda: told(home)["state"] == "unsupervised")
    assert "dslaunch stop" in dslaunch(home, "resume", run.name, status=2)
    assert "processes ended that had lost their supervisor" in dslaunch(home, "stop", run.name)
    assert not any(map(is_alive, others))
    assert told(home)["state"] == "stopped"


def test_a_process_that_is_not_the_recorded_one_is_left_alone(home: Path) -> None:
    run = begin(home, steps=4)
    assert "rank 1 of attempt 1" in dslaunch(home, "logs", "--rank", "1", "--follow")  # to the end of the run
    assert told(home)["state"] == "finished"
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        real = identify(bystander.pid)
        assert real is not None
        other = Process(real.pid, real.pgid, real.start_time - 1)
        update_state(run, status="running", supervisor=other, process=other)
        assert told(home)["state"] == "lost"
        assert "lost already" in dslaunch(home, "stop", run.name)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_run_of_another_host_says_where_to_type(home: Path) -> None:
    run = begin(home, steps=4)
    wait_for(lambda: told(home)["state"] == "finished")
    update_state(run, status="running", host="node7")
    assert told(home)["state"] == "unknown"
    assert "node7" in dslaunch(home, "stop", run.name, status=2)
    assert isinstance(read_state(run), State)


def test_a_sweep_on_this_machine_is_one_run_after_the_other(home: Path) -> None:
    words = [*LOCAL, "launcher=torchrun", "module=", "script=train.py", "training.seed=1,2", "--multirun"]
    assert "training.seed=2" in dslaunch(home, *words, "--", "2", "0", "0.1")
    sweep, first, second = sorted((home / "runs").iterdir())
    assert [first.name, second.name] == [f"{sweep.name}.1", f"{sweep.name}.2"]
    assert read_events(first)[-1]["kind"] == read_events(second)[-1]["kind"] == "finished"
    assert read_events(first)[-1]["time"] <= read_events(second)[0]["time"]
    assert "finished" in dslaunch(home, "status", sweep.name).splitlines()[2]
    assert "no override has several values" in dslaunch(home, *LOCAL, "--multirun", status=2)
    misfit = dslaunch(home, *LOCAL, "training.micro_batch=8,7", "--multirun", status=3)
    assert "Nothing of the sweep was launched" in misfit
    assert len(list((home / "runs").iterdir())) == 3


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_and_not_one_run_alone(home: Path) -> None:
    words = [*LOCAL, "launcher=torchrun", "module=", "script=train.py", "training.seed=1,2", "--multirun"]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "dslaunch", *words, "--", "400", "0", "0.1"],
        cwd=home, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: any((home / "runs").glob("*.1/ranks/*.step")))
        sweep.send_signal(signal.SIGINT)
        output, _ = sweep.communicate(timeout=LIMIT_S)
    finally:
        sweep.kill()
        sweep.wait()
    assert (sweep.returncode, "run 1 was stopped, and 1 were not begun" in output) == (1, True), output
    (first,) = (path.parent for path in (home / "runs").glob("*/state.json"))
    assert read_state(first).status == "stopped"


def _losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def test_a_killed_and_a_stopped_run_of_the_runtime_go_on_exactly(home: Path) -> None:
    """The tiny model on the CPU: one rank is killed with SIGKILL, its resume is stopped, the next one finishes."""
    words = [*LOCAL, "launcher=torchrun", "training.steps=80", "checkpoint.every=5"]
    dslaunch(home, *words, "run.root=whole")
    (whole,) = (home / "whole").iterdir()

    dslaunch(home, *words, "restart.max=0", "--detach")
    (run,) = (home / "runs").iterdir()
    wait_for(lambda: furthest(read_ranks(run / "ranks")) >= 7)  # a command takes as long as many steps
    victim = read_ranks(run / "ranks")[1].process
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: told(home)["state"] == "failed")
    assert told(home)["first_failure"]["exit_status"] == 137

    dslaunch(home, "resume", run.name, "--detach")
    wait_for(lambda: furthest(read_ranks(run / "ranks")) > 0)
    dslaunch(home, "stop", run.name)
    status = told(home)
    assert (status["state"], status["attempt"]) == ("stopped", 2)
    assert status["checkpoint"]["step"] == status["step"]  # SIGTERM saves

    assert f"from step-{status['step']:08d}" in dslaunch(home, "resume", run.name)
    assert _losses(run) == _losses(whole)
    assert list(_losses(run)) == list(range(1, 81))
