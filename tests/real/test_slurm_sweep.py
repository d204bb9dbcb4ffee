"""A sweep through a real SLURM: array jobs whose tasks are runs like any other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.state import read_events, read_state
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture
from tests.real.test_slurm_control import Shell, _start_of, _until
from tests.real.test_slurm_control import home as home  # a fixture
from tests.real.test_slurm_control import shell as shell  # a fixture

WHAT = ["recipe=vla_tiny", "module=", "script=train.py", "launcher=slurm", "training.seed=1,2", "--multirun"]


def _launch(shell: Shell, endings: dict[str, int], steps: int, *words: str, status: int = 0) -> str:
    how = [f"launcher.python={sys.executable}", "--skip-preflight"]
    return shell(*WHAT, *how, *words, "--", json.dumps(endings), str(steps), status=status)


def _sweep(shell: Shell) -> Path:
    (found,) = (path.parent for path in (shell.home / "runs").glob("*/sweep.json"))
    return found


def _states(shell: Shell) -> list[Any]:
    told = json.loads(shell("status", _sweep(shell).name, "--json"))
    return [run["status"] and run["status"]["state"] for run in told["runs"]]


def test_a_sweep_is_an_array_of_runs(shell: Shell, slurm: SlurmCluster) -> None:
    launched = _launch(shell, {}, 2, "cluster=2x4xA100", "training.micro_batch=4,7", "--skip-refused", "--wait")
    sweep = _sweep(shell)
    runs = [sweep.with_name(f"{sweep.name}.{number}") for number in (1, 3)]
    jobs = [read_state(run).slurm_job for run in runs]
    assert f"array job {jobs[0].partition('_')[0]} submitted: 2 runs, tasks 1,3" in launched
    assert [job.partition("_")[2] for job in jobs] == ["1", "3"]
    assert [json.loads((run / "plan.json").read_text())["training"]["seed"] for run in runs] == [1, 2]
    assert _states(shell) == ["finished", None, "finished", None]
    assert runs[1].name in shell("compare", sweep.name)


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_the_tasks_of_an_array(shell: Shell, slurm: SlurmCluster) -> None:
    """Each task fails once, is put back into the queue by itself, and goes on from its own checkpoint."""
    how = ("launcher.slurm.requeue=1", "launcher.slurm.at_once=2")
    words = ("cluster=2x4xA100", "training.micro_batch=4,7", *how)
    refused = _launch(shell, {"1": 7}, 8, *words, status=3)
    assert [line.split()[:3] for line in refused.splitlines() if line[:1].isdigit()] == [
        ["1", "1", "4"], ["2", "1", "7"], ["3", "2", "4"], ["4", "2", "7"]
    ]  # fmt: skip
    assert "Nothing of the sweep was launched. --skip-refused launches the others" in refused
    assert not (shell.home / "runs").exists()
    assert not slurm.queue()

    launched = _launch(shell, {"1": 7}, 16, *words, "--skip-refused")
    sweep = _sweep(shell)
    runs = [sweep.with_name(f"{sweep.name}.{number}") for number in (1, 3)]
    jobs = [read_state(run).slurm_job for run in runs]
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_1", f"{array}_3"]
    assert f"array job {array} submitted: 2 runs, tasks 1,3" in launched
    assert slurm.job(jobs[0])["ArrayTaskThrottle"] == "2"
    _until(lambda: _states(shell) == ["finished", None, "finished", None])
    for run, job, seed in zip(runs, jobs, (1, 2), strict=True):
        assert json.loads((run / "plan.json").read_text())["training"]["seed"] == seed
        told = json.loads(shell("status", run.name, "--json"))
        assert (told["attempt"], told["step"], told["job"]) == (2, 16, job)
        assert _start_of(run, 2) >= 2
        assert "attempt 2 goes" in (run / "logs" / f"slurm-{job}.out").read_text()
        assert [event["kind"] for event in read_events(run)].count("job_requeued") == 1
    assert runs[0].name in shell("compare", sweep.name)
    assert "refused" in shell("status", sweep.name)
    assert shell("logs", sweep.name, "--rank", "5").count("what rank 5") == 0  # of the second attempt
    assert shell("logs", sweep.name, "--rank", "5", "--attempt", "1").count("what rank 5") == 2


@pytest.mark.slow
def test_a_sweep_is_stopped_and_resumed_by_its_name(shell: Shell, slurm: SlurmCluster) -> None:
    """Runs on one node and on two are two arrays; jobs queued behind a task end with it."""
    words = ("cluster=2x4xA100,1x8xA100", "training.micro_batch=4", "launcher.slurm.continuations=1")
    launched = _launch(shell, {}, 400, *words)
    assert launched.count("array job") == 3  # the sweep's own line, and one each
    sweep = _sweep(shell)
    assert all(len(read_state(sweep.with_name(f"{sweep.name}.{n}")).continuations) == 1 for n in (1, 2, 3, 4))
    _until(lambda: all((run["status"]["step"] or 0) > 3 for run in _told(shell)))
    shell("stop", sweep.name)
    assert _states(shell) == ["stopped"] * 4
    _until(lambda: not slurm.queue())

    resumed = shell("resume", sweep.name, "--skip-preflight")
    assert resumed.count("attempt 2, from step-") == 4
    _until(lambda: all(run["status"]["attempt"] == 2 and (run["status"]["step"] or 0) > 4 for run in _told(shell)))
    shell("stop", f"{sweep.name}.1")
    assert _states(shell) == ["stopped", "running", "running", "running"]
    assert "takes one run" in shell("watch", sweep.name, "--once", status=2)
    shell("stop", sweep.name)


@pytest.mark.slow
def test_a_task_that_waits_is_stopped_too(shell: Shell, slurm: SlurmCluster) -> None:
    """One run at a time; of the two only the first has something to resume from."""
    _launch(shell, {}, 400, "cluster=2x4xA100", "training.micro_batch=4", "launcher.slurm.at_once=1")
    name = _sweep(shell).name
    _until(lambda: (_told(shell)[0]["status"]["step"] or 0) > 3)
    assert _states(shell) == ["running", "queued"]
    shell("stop", name)
    assert _states(shell) == ["stopped", "stopped"]
    _until(lambda: not slurm.queue())
    resumed = shell("resume", name, "--skip-preflight", status=2)
    assert f"{name}.1: attempt 2, from step-" in resumed
    assert f"{name}.2: no checkpoint" in resumed
    shell("stop", f"{name}.1")


@pytest.mark.slow
def test_a_task_goes_on_in_the_job_behind_it(shell: Shell, slurm: SlurmCluster) -> None:
    words = ("cluster=2x4xA100", "training.micro_batch=4", "launcher.slurm.continuations=1")
    _launch(shell, {"1": 7}, 16, *words, "--wait")
    assert _states(shell) == ["finished", "finished"]
    assert [run["status"]["attempt"] for run in _told(shell)] == [2, 2]
    _until(lambda: not slurm.queue())


def test_slurm_refuses_a_sweep_as_a_whole(shell: Shell, slurm: SlurmCluster) -> None:
    words = ("cluster=2x4xA100", "training.micro_batch=4", "launcher.slurm.partition=nosuch")
    assert "invalid partition specified: nosuch" in _launch(shell, {}, 8, *words, status=2)
    assert not list((shell.home / "runs").iterdir())
    assert "to start at" in _launch(shell, {}, 8, *words[:2], "--test-only")
    assert not slurm.queue()


def _told(shell: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shell("status", _sweep(shell).name, "--json"))["runs"]
    return found
