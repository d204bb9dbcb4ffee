"""Requeue, continuation jobs, signals and the verbs for a run, through a real SLURM: 2 nodes x 4 GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.attempts import logs_of
from dslaunch.run.state import read_events, read_state
from tests.launching import HOSTILE
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture

TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
from dslaunch.progress import resuming, step

rank, run, attempt = int(os.environ["RANK"]), Path(os.environ["DSLAUNCH_RUN_DIR"]), os.environ["DSLAUNCH_ATTEMPT"]
endings = json.loads(sys.argv[1])  # attempt: the status that rank 5 ends it with at step 3
latest = run / "checkpoints" / "latest"
done = int(latest.read_text().removeprefix("step-")) if resuming() and latest.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print(f"rank {rank} of attempt {attempt} goes on from step {done}", flush=True)
for number in range(done + 1, int(sys.argv[2]) + 1):
    time.sleep(0.3)
    if rank == 0 and (number % 2 == 0 or asked):
        (latest.parent / f"step-{number}").mkdir(parents=True, exist_ok=True)
        latest.with_suffix(".new").write_text(f"step-{number}")
        latest.with_suffix(".new").replace(latest)
    step(number)
    if asked:
        sys.exit(143)
    if rank == 5 and number == done + 3 and attempt in endings:
        while not latest.exists():
            time.sleep(0.1)  # rank 0 may have started later
        print("what rank 5 says before it fails", flush=True)
        sys.exit(endings[attempt])
"""
LIMIT_S = 240.0


@pytest.fixture
def home(tmp_path: Path, slurm: SlurmCluster) -> Iterator[Path]:
    """A working folder with a hostile name and a trainer in it; jobs that are left at the end are cancelled."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    yield folder
    for job in slurm.queue():
        slurm.run("scancel", job)
    slurm.wait_for_idle()


class Shell:
    """A shell of a user, from which the command line is typed."""

    def __init__(self, home: Path, slurm: SlurmCluster) -> None:
        self.home, self.slurm = home, slurm

    def __call__(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", *words],
            cwd=self.home,
            env={**self.slurm.environ, "COLUMNS": "300"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def launch(self, endings: dict[str, int], *words: str, steps: int = 8, status: int = 0) -> str:
        python = f"launcher.python={sys.executable}"
        what = ["recipe=vla_tiny", "cluster=2x4xA100", "training.micro_batch=4", "module=", "script=train.py"]
        how = ["launcher=slurm", python, "--skip-preflight"]
        return self(*what, *how, *words, "--", json.dumps(endings), str(steps), status=status)

    @property
    def run(self) -> Path:
        """The one run."""
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", "--json"))
        return found

    def wait_for(self, *states: str) -> dict[str, Any]:
        limit = time.monotonic() + LIMIT_S
        while (told := self.told())["state"] not in states:
            assert time.monotonic() < limit, (told, read_events(self.run))
            time.sleep(1)
        return told


@pytest.fixture
def shell(home: Path, slurm: SlurmCluster) -> Shell:
    return Shell(home, slurm)


def _kinds(run: Path) -> list[str]:
    """That GPUs are not seen is told where an attempt lasts until they are looked at."""
    return [event["kind"] for event in read_events(run) if event["kind"] != "not_watched"]


def _start_of(run: Path, attempt: int) -> int:
    """The step that an attempt went on from."""
    return int((logs_of(run, attempt) / "rank-0.log").read_text().splitlines()[0].split()[-1])


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.5)


def test_a_job_that_fails_is_requeued_and_goes_on_from_its_checkpoint(shell: Shell) -> None:
    shell.launch({"1": 7}, "launcher.slurm.requeue=1", steps=16)
    told = shell.wait_for("finished", "failed", "stopped")
    assert (told["state"], told["attempt"], told["step"]) == ("finished", 2, 16)
    run = shell.run
    assert _kinds(run) == [
        "prepared", "submitted", "job_started", "started", "attempt_ended", "job_ended", "job_requeued",
        "job_started", "started", "job_ended",
    ]  # fmt: skip
    (ended,) = (event["details"] for event in read_events(run) if event["kind"] == "attempt_ended")
    assert (ended["cause"], ended["rank"]) == ("program", 5)
    assert _start_of(run, 1) == 0
    assert _start_of(run, 2) >= 2
    shown = shell("logs", run.name, "--first-error", "--attempt", "1")
    assert "rank 5" in shown.splitlines()[0]
    assert "what rank 5 says" in shown
    assert "attempt 1 goes" in (job_log := (run / "logs" / f"slurm-{told['job']}.out").read_text())
    assert "attempt 2 goes" in job_log
    assert "has finished" in shell("resume", run.name, status=2)


def test_a_mistake_in_the_configuration_is_not_tried_again(shell: Shell, slurm: SlurmCluster) -> None:
    shell.launch({"1": 2}, "launcher.slurm.requeue=3", "launcher.slurm.continuations=1")
    told = shell.wait_for("finished", "failed", "stopped")
    assert (told["state"], told["attempt"], told["first_failure"]["rank"]) == ("failed", 1, 5)
    assert "job_requeued" not in _kinds(shell.run)
    _until(lambda: not slurm.queue())
    assert _kinds(shell.run).count("job_started") == 1


def test_a_continuation_goes_on_where_the_job_before_failed(shell: Shell, slurm: SlurmCluster) -> None:
    output = shell.launch({"1": 7}, "launcher.slurm.continuations=2", "--wait")
    assert "queued behind it" in output
    state = read_state(shell.run)
    assert (state.status, len(state.continuations)) == ("finished", 2)
    assert shell.told()["attempt"] == 2
    assert _start_of(shell.run, 2) >= 2
    _until(lambda: not slurm.queue())
    assert _kinds(shell.run).count("job_started") == 2  # the third had nothing left to do


def test_a_job_is_stopped_with_all_that_is_queued_behind_it_and_resumed(shell: Shell, slurm: SlurmCluster) -> None:
    shell.launch({}, "launcher.slurm.requeue=2", "launcher.slurm.continuations=1", steps=200)
    _until(lambda: (shell.told()["step"] or 0) >= 3)
    assert "running" in shell("watch", "--once")
    assert "is running" in shell("resume", shell.run.name, status=2)
    assert "stopped" in shell("stop", shell.run.name)
    assert shell.told()["state"] == "stopped"
    _until(lambda: not slurm.queue())
    assert "job_requeued" not in _kinds(shell.run)

    shell("resume", shell.run.name, "--skip-preflight")
    _until(lambda: shell.told()["attempt"] == 2 and (shell.told()["step"] or 0) > 3)
    assert _start_of(shell.run, 2) >= 2
    shell("stop", shell.run.name)


@pytest.mark.slow
def test_a_job_that_others_requeue_too_often_gives_up(shell: Shell, slurm: SlurmCluster) -> None:
    """What a preemption or a lost node does: SLURM itself starts the job again, and counts."""
    shell.launch({}, "launcher.slurm.requeue=1", steps=1000)
    job = read_state(shell.run).slurm_job
    for started in (1, 2):
        _until(lambda count=started: _kinds(shell.run).count("started") == count)  # type: ignore[misc]
        _until(lambda: any((shell.run / "ranks").glob("*.pid")))
        slurm.run("scontrol", "requeue", job)
    told = shell.wait_for("failed", "finished", "stopped")
    assert (told["state"], told["attempt"]) == ("failed", 2)
    assert "SLURM started this job again 2 times, and 1 are allowed" in shell("logs", shell.run.name)


def test_slurm_is_asked_when_it_would_start_a_job(shell: Shell, slurm: SlurmCluster) -> None:
    assert "to start at" in shell.launch({}, "--test-only")
    assert "partition" in shell.launch({}, "--test-only", "launcher.slurm.partition=nosuch", status=2)
    assert not (shell.home / "runs").exists()
    assert not slurm.queue()


@pytest.mark.slow
def test_before_the_time_limit_ranks_save_and_the_job_goes_on(shell: Shell) -> None:
    """SLURM counts in minutes, and sends the signal up to a minute early."""
    limits = ["launcher.slurm.time=1", "launcher.slurm.signal_before_s=20", "launcher.slurm.requeue=6"]
    shell.launch({}, *limits, steps=150)
    told = shell.wait_for("finished", "failed", "stopped")
    assert (told["state"], told["step"]) == ("finished", 150)
    assert told["attempt"] >= 2
    assert _kinds(shell.run).count("job_requeued") == told["attempt"] - 1
