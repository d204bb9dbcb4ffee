"""Launches through a real SLURM: 8 nodes x 8 GPUs, with a probe in place of the training script."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.state import read_events, read_state
from tests.launching import HOSTILE
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture

ARGUMENTS = ["two words", "it's", '"q"', "$HOME;`id`", "a=b", "é", "", "*", "--flag=1 2", "back\\slash"]
PROBE = """
import json, os, sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
         "SLURMD_NODENAME", "SLURM_JOB_ID", "SECRET", "UNNAMED", "FROM_SETUP")
record = {**{name: os.environ.get(name) for name in names}, "args": sys.argv[1:], "cwd": os.getcwd()}
Path(os.environ["DSLAUNCH_RUN_DIR"], f"probe-{os.environ['RANK']}.json").write_text(json.dumps(record))
"""
FAIL_ON_13 = """
import os, sys
print(f"rank {os.environ['RANK']} speaks")
sys.exit(5 * (os.environ["RANK"] == "13"))
"""
SLEEP = "import os, pathlib, time\npathlib.Path(os.environ['DSLAUNCH_RUN_DIR'], 'up').touch()\ntime.sleep(1000)\n"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working folder with a hostile name, and the programs in it."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    for name, text in (("the probe.py", PROBE), ("fail.py", FAIL_ON_13), ("sleep.py", SLEEP)):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def start(home: Path, slurm: SlurmCluster) -> Iterator[Start]:
    """Starts the command line in `home`; jobs and processes that are left at the end are stopped."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, before: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*before, sys.executable, "-m", "dslaunch", *words],
                cwd=home,
                env={**slurm.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    for job in slurm.queue():
        slurm.run("scancel", job)
    slurm.wait_for_idle()


def _words(script: str, *more: str, launcher: str = "slurm") -> list[str]:
    python = f"launcher.python={sys.executable}"
    words = ["recipe=vla70b", "cluster=64xA100", f"launcher={launcher}", python, f"script={script}"]
    return [*words, "preflight.enabled=false", *more]


def _done(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def _run_folder(home: Path) -> Path:
    (folder,) = (home / "runs").iterdir()
    return folder


def _probes(run: Path) -> list[dict[str, Any]]:
    probes = [json.loads(path.read_text()) for path in run.glob("probe-*.json")]
    return sorted(probes, key=lambda probe: int(probe["RANK"]))


def _wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_each_of_64_ranks_is_right(home: Path, start: Start) -> None:
    status, output = _done(start(*_words("the probe.py"), "--wait", "--", *ARGUMENTS))
    assert status == 0, output
    run = _run_folder(home)
    probes = _probes(run)
    assert [probe["RANK"] for probe in probes] == [str(rank) for rank in range(64)]
    for rank, probe in enumerate(probes):
        assert probe["LOCAL_RANK"] == str(rank % 8)
        assert probe["SLURMD_NODENAME"] == f"n{rank // 8 + 1}"
        assert probe["WORLD_SIZE"] == "64"
        assert probe["MASTER_ADDR"] == "n1"
        assert probe["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert probe["args"] == ARGUMENTS
        assert probe["cwd"] == str(home)
    (port,) = {probe["MASTER_PORT"] for probe in probes}
    assert 1024 <= int(port) <= 65535
    state = read_state(run)
    assert (state.launcher, state.status, state.exit_status) == ("slurm", "finished", 0)
    assert {probe["SLURM_JOB_ID"] for probe in probes} == {state.slurm_job}
    kinds = [event["kind"] for event in read_events(run) if event["kind"] != "not_watched"]  # told after 5 s
    assert kinds == ["prepared", "submitted", "job_started", "started", "job_ended", "finished"]


def test_a_submission_returns_at_once(home: Path, start: Start, slurm: SlurmCluster) -> None:
    status, output = _done(start(*_words("sleep.py", launcher="auto")))
    assert status == 0, output
    run = _run_folder(home)
    state = read_state(run)
    assert (state.status, state.launcher) == ("submitted", "slurm")
    assert f"job {state.slurm_job} submitted" in output
    assert slurm.queue() == [state.slurm_job]
    job = slurm.job(state.slurm_job)
    nodes = job["NumNodes"].partition("-")[0]  # a job that waits shows its least and its most
    assert (nodes, job["NumTasks"], job["TresPerNode"]) == ("8", "64", "gres:gpu:8")
    # A job that is cancelled while its node is starting it completes minutes later.
    _wait_until(lambda: bool(list(home.glob("runs/*/up"))))


def test_a_rank_that_fails_fails_the_job(home: Path, start: Start) -> None:
    status, output = _done(start(*_words("fail.py"), "--wait"))
    assert status == 1, output
    assert "rank 13 speaks" in output
    state = read_state(_run_folder(home))
    assert (state.status, state.exit_status) == ("failed", 5)
    assert (_run_folder(home) / "ranks" / "13.exit").read_text().strip() == "5"


def test_ctrl_c_stops_following_and_not_the_job(home: Path, start: Start, slurm: SlurmCluster) -> None:
    process = start(*_words("sleep.py"), "--wait")
    _wait_until(lambda: bool(list(home.glob("runs/*/up"))))
    process.send_signal(signal.SIGINT)
    status, output = _done(process)
    job = read_state(_run_folder(home)).slurm_job
    assert status == 0, output
    assert f"dslaunch stop {_run_folder(home).name}" in output
    assert slurm.job(job)["JobState"] == "RUNNING"


def test_a_job_that_someone_cancels_is_no_success(home: Path, start: Start, slurm: SlurmCluster) -> None:
    process = start(*_words("sleep.py"), "--wait")
    _wait_until(lambda: bool(list(home.glob("runs/*/up"))))
    slurm.run("scancel", read_state(_run_folder(home)).slurm_job)
    status, output = _done(process)
    assert status == 1, output
    assert "CANCELLED" in output
    assert read_state(_run_folder(home)).status == "stopped"


def test_what_sbatch_refuses_leaves_nothing(home: Path, start: Start, slurm: SlurmCluster) -> None:
    status, output = _done(start(*_words("the probe.py", "launcher.slurm.partition=no_such")))
    assert status == 2, output
    assert "invalid partition specified: no_such" in output
    assert "launcher.slurm.*" in output
    assert slurm.queue() == []
    assert not list((home / "runs").iterdir())


def test_sbatch_without_a_controller_launches_nothing(home: Path, start: Start, slurm: SlurmCluster) -> None:
    down = home / "slurm.conf"
    lines = (slurm.folder / "slurm.conf").read_text().splitlines()
    down.write_text("\n".join("SlurmctldPort=1" if line.startswith("SlurmctldPort") else line for line in lines))
    (home / "gres.conf").write_text((slurm.folder / "gres.conf").read_text())
    status, output = _done(start(*_words("the probe.py"), SLURM_CONF=str(down)))
    assert status == 5, output
    assert "nothing was launched: sbatch reaches no SLURM controller" in output
    assert not list((home / "runs").iterdir())


def test_every_setting_reaches_the_job(home: Path, start: Start, slurm: SlurmCluster) -> None:
    modules = home.parent / "modules.bash"  # bash expands the value of BASH_ENV
    modules.write_text(f"module() {{ echo \"$*\" >>{shlex.quote(str(home / 'loaded'))}; }}\n")
    settings = [
        "launcher.slurm.partition=train",
        "launcher.slurm.exclude=n3",
        "launcher.slurm.constraint=main|spare",
        "launcher.slurm.time=00:07:00",
        "launcher.slurm.comment=a comment",
        "launcher.slurm.modules=[cuda/12.4,gcc]",
        "launcher.slurm.setup=['export FROM_SETUP=\"a b\"']",
        "launcher.slurm.sbatch_extra=['--nice=77']",
        "launcher.pass_env=[SECRET]",
    ]
    environ = {
        "SECRET": "s3cret, with = and $x",
        "UNNAMED": "1",
        "SBATCH_PARTITION": "elsewhere",
        "BASH_ENV": str(modules),
    }
    status, output = _done(start(*_words("the probe.py", *settings), "--wait", **environ))
    assert status == 0, output
    run = _run_folder(home)
    job = slurm.job(read_state(run).slurm_job)
    assert (job["Partition"], job["ExcNodeList"], job["NodeList"]) == ("train", "n3", "n[1-2,4-9]")
    assert (job["Features"], job["TimeLimit"], job["Nice"]) == ("main|spare", "00:07:00", "77")
    assert (home / "loaded").read_text().splitlines() == ["load cuda/12.4", "load gcc"]
    probes = _probes(run)
    assert len(probes) == 64
    assert {probe["FROM_SETUP"] for probe in probes} == {"a b"}
    assert {probe["SECRET"] for probe in probes} == {environ["SECRET"]}
    assert {probe["UNNAMED"] for probe in probes} == {None}
    texts = [path.read_text() for path in run.rglob("*") if path.is_file() and not path.name.startswith("probe-")]
    assert not [text for text in texts if "s3cret" in text]


def test_a_site_has_a_template_of_its_own(home: Path, start: Start, slurm: SlurmCluster) -> None:
    template = Path(__file__).parents[2] / "templates" / "job.sbatch.j2"
    site = home / "site" / "templates"
    site.mkdir(parents=True)
    changed = template.read_text().replace("set -euo pipefail\n", "#SBATCH --nice=55\nset -euo pipefail\n", 1)
    (site / "job.sbatch.j2").write_text(changed)
    status, output = _done(start(*_words("the probe.py"), "--config-dir", "site", "--wait"))
    assert status == 0, output
    run = _run_folder(home)
    assert slurm.job(read_state(run).slurm_job)["Nice"] == "55"
    assert len(_probes(run)) == 64


@pytest.mark.parametrize("script", ["the probe.py", "fail.py"])
def test_inside_an_allocation_no_job_is_submitted(
    script: str, home: Path, start: Start, slurm: SlurmCluster
) -> None:
    salloc = ("salloc", "--nodes=8", "--ntasks-per-node=8", "--gres=gpu:8", "--cpus-per-task=16", "--exclusive")
    status, output = _done(start(*_words(script, launcher="auto"), before=salloc))
    run = _run_folder(home)
    state = read_state(run)
    if script == "fail.py":
        assert status == 1, output
        assert "rank 13 speaks" in output
        assert (state.status, state.exit_status) == ("failed", 5)
        return
    assert status == 0, output
    probes = _probes(run)
    assert [probe["RANK"] for probe in probes] == [str(rank) for rank in range(64)]
    assert {probe["MASTER_ADDR"] for probe in probes} == {"n1"}
    (job,) = {probe["SLURM_JOB_ID"] for probe in probes}
    assert slurm.job(job)["JobName"] == "interactive"
    assert (state.status, state.launcher, state.slurm_job) == ("finished", "slurm", "")


def test_stopping_inside_an_allocation_ends_the_ranks(home: Path, start: Start, slurm: SlurmCluster) -> None:
    salloc = ("salloc", "--nodes=8", "--ntasks-per-node=8", "--gres=gpu:8", "--cpus-per-task=16", "--exclusive")
    process = start(*_words("sleep.py"), before=(*salloc, "bash", "-c", 'echo $$ >pid; exec "$@"', "bash"))
    _wait_until(lambda: bool(list(home.glob("runs/*/up"))))
    os.kill(int((home / "pid").read_text()), signal.SIGINT)
    status, output = _done(process)
    assert status == 1, output
    assert read_state(_run_folder(home)).status == "stopped"
    _wait_until(lambda: slurm.run("squeue", "--steps", "--noheader") == "")


def test_a_controller_that_is_down_launches_nothing(home: Path, start: Start, slurm: SlurmCluster) -> None:
    down = home / "slurm.conf"
    lines = (slurm.folder / "slurm.conf").read_text().splitlines()
    down.write_text("\n".join("SlurmctldPort=1" if line.startswith("SlurmctldPort") else line for line in lines))
    (home / "gres.conf").write_text((slurm.folder / "gres.conf").read_text())
    status, output = _done(start(*_words("the probe.py", launcher="auto"), SLURM_CONF=str(down)))
    assert status == 5, output
    run = _run_folder(home)
    assert f"dslaunch launch {shlex.quote(str(run))} launcher=slurm" in output
    assert read_state(run).status == "prepared"
    status, output = _done(start("launch", str(run), "launcher=slurm", "run.root=second", "--wait"))
    assert status == 0, output
    assert len(list((home / "second").glob("*/probe-*.json"))) == 64
