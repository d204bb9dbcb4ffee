"""Code on the nodes' own disks: over ssh to hosts that see nothing of the user's, and under a real SLURM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.state import read_events, read_state
from tests.launching import HOSTILE
from tests.real.hosts import Hosts, ssh_hosts
from tests.real.parts import need
from tests.real.slurm import SlurmCluster, slurm_cluster

PROBE = """
import json, os, pathlib, sys
import helper.words
here = pathlib.Path.cwd()
found = sorted(str(path.relative_to(here.parent)) for path in here.parent.rglob("*") if path.is_file())
found = [name for name in found if "__pycache__" not in name and not name.startswith(".staged")]
print(json.dumps({"cwd": os.getcwd(), "said": helper.words.SAID, "files": found}), flush=True)
if "--write" in sys.argv and os.environ["RANK"] == "0":
    pathlib.Path("made by the run").write_text("kept")
"""


def _code(folder: Path) -> Path:
    """A project with what must not leave it; returns the folder that is launched from, inside of it."""
    files = {
        "src it's/probe.py": PROBE, "src it's/helper/__init__.py": "",
        "src it's/helper/words.py": "SAID = 'é $x'\n", "data/é file": "x" * 200_000,
        ".git/config": "no", ".env": "TOKEN=no", "keys/id_rsa": "no", "notes.tmp": "no",
    }  # fmt: skip
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "src it's"


COPIED = ["data/é file", "src it's/helper/__init__.py", "src it's/helper/words.py", "src it's/probe.py"]


def _dslaunch(home: Path, environ: Mapping[str, str], *words: str, status: int = 0) -> str:
    what = ["recipe=vla_tiny", "cluster=2x1xA100", "training.micro_batch=4", "module=", "script=probe.py"]
    how = [f"launcher.python={sys.executable}", "--skip-preflight", "-y", "launcher.stage.from=.."]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *what, *how, *words],
        cwd=home, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def _dslaunch_verb(home: Path, environ: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words], cwd=home, env=dict(environ), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def _only(home: Path, root: str = "runs") -> Path:
    (found,) = (home / root).iterdir()
    return found


def _said(run: Path, rank: int) -> dict[str, Any]:
    lines = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts with a disk of their own, `local`, which do not see the user's folders."""
    need("sshd")
    if os.geteuid() != 0:
        pytest.skip("hosts on one machine are started as root")
    private = (tmp_path / "user", tmp_path / "local")
    for folder in private:
        folder.mkdir()
    with ssh_hosts(2, private) as found:
        yield found


def _on(hosts: Hosts, host: str, *words: str) -> str:
    return subprocess.run(
        ["ssh", "-n", host, *words], env=hosts.environ, capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.slow
def test_hosts_work_in_their_own_copy_and_keep_nothing_of_it(tmp_path: Path, hosts: Hosts) -> None:
    home, local = _code(tmp_path / "user" / HOSTILE), tmp_path / "local"
    words = ("launcher=ssh", "cluster.hosts=[n1,n2]", f"launcher.stage.to={local}")
    left_out = "launcher.stage.exclude=['.git','.env','id_rsa*','*.tmp']"
    output = _dslaunch(home, hosts.environ, *words, left_out, "--", "--write")
    run = _only(home)
    for rank in (0, 1):
        said = _said(run, rank)
        assert said["cwd"] == str(local / run.name / "src it's")
        assert (said["said"], said["files"]) == ("é $x", COPIED)
    assert "n1: the run has written files" in output
    assert _on(hosts, "n1", "find", str(local), "-type", "f") == f"{local}/{run.name}/src it's/made by the run\n"
    assert _on(hosts, "n2", "find", str(local), "-mindepth", "1") == ""

    _on(hosts, "n2", "mount", "-o", "remount,size=256k", str(local))
    refused = _dslaunch(home, hosts.environ, *words, left_out, "run.root=second", status=2)
    assert "n2: launcher.stage.to: n2: " in refused
    assert "KiB free, and the code takes" in refused
    assert not list(_only(home, "second").glob("ranks/*"))
    assert "failed" in _dslaunch_verb(home, hosts.environ, "status", str(_only(home, "second")))
    assert _on(hosts, "n1", "find", str(local), "-type", "f").count("\n") == 1
    assert _on(hosts, "n2", "find", str(local), "-mindepth", "1") == ""
    outside = _dslaunch(home, hosts.environ, *words, "script=/etc/passwd", "--dry-run", status=2)
    assert "would not be run from the copy" in outside


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Two nodes with a disk of their own, `local`."""
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    local = tmp_path / "local"
    local.mkdir()
    with slurm_cluster(2, 1, private=(local,)) as cluster:
        yield cluster


def test_slurm_hands_the_code_from_node_to_node(tmp_path: Path, slurm: SlurmCluster) -> None:
    home, local = _code(tmp_path / HOSTILE), tmp_path / "local"
    words = ("launcher=slurm", f"launcher.stage.to={local}", "launcher.slurm.cpus_per_task=1", "--wait")
    left_out = "launcher.stage.exclude=['.git','.env','id_rsa*','*.tmp']"
    _dslaunch(home, slurm.environ, *words, left_out)
    run = _only(home)
    with tarfile.open(run / "stage.tar") as archive:
        files = [member.name for member in archive if member.isfile()]
    assert sorted(files) == [f"./{name}" for name in COPIED]
    for rank in (0, 1):
        said = _said(run, rank)
        assert said["cwd"] == str(local / run.name / "src it's")
        assert (said["said"], said["files"]) == ("é $x", COPIED)
    left = slurm.run("srun", "--nodes=2", "--ntasks=2", "find", str(local), "-mindepth", "1")
    assert left == ""
    slurm.run("srun", "--nodes=1", "--nodelist=n2", "mount", "-o", "remount,size=256k", str(local))
    refused = _dslaunch(home, slurm.environ, *words, left_out, "run.root=second", status=1)
    assert "launcher.stage.to: " in refused
    assert "KiB free, and the code takes" in refused
    assert "no rank was started" in refused
    assert slurm.run("srun", "--nodes=2", "--ntasks=2", "find", str(local), "-mindepth", "1") == ""


@pytest.mark.slow
def test_a_job_that_is_stopped_removes_its_copies_and_one_that_is_cancelled_names_them(
    tmp_path: Path, slurm: SlurmCluster
) -> None:
    home, local = _code(tmp_path / HOSTILE), tmp_path / "local"
    (home / "probe.py").write_text(f"{PROBE}\nimport time; time.sleep(1000)\n")
    words = ("launcher=slurm", f"launcher.stage.to={local}", "launcher.slurm.cpus_per_task=1")
    _dslaunch(home, slurm.environ, *words)
    run = _only(home)
    logs = [run / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    _until(lambda: all(path.is_file() and '"cwd"' in path.read_text() for path in logs))
    held = slurm.run("srun", "--overlap", f"--jobid={_job(run)}", "--nodes=2", "--ntasks=2", "ls", str(local))
    assert held.split() == [run.name, run.name]
    said = _dslaunch_verb(home, slurm.environ, "stop", run.name)
    assert "stays on" not in said
    assert [event["kind"] for event in read_events(run)].count("unstaged") == 1
    assert slurm.run("srun", "--nodes=2", "--ntasks=2", "find", str(local), "-mindepth", "1") == ""
    assert (run / "ranks" / "1.exit").read_text() == "143\n"
    assert "stopped" in _dslaunch_verb(home, slurm.environ, "status", run.name)

    _dslaunch(home, slurm.environ, *words, "run.root=second")
    cancelled = _only(home, "second")
    _until(lambda: len(list(cancelled.glob("ranks/*.exit"))) == 2)
    slurm.run("scancel", _job(cancelled))
    slurm.wait_for_idle()
    said = _dslaunch_verb(home, slurm.environ, "stop", str(cancelled))
    assert "its copy of the code stays on n[1-2]" in said
    command = said.partition("To remove it: ")[2].splitlines()[0]
    slurm.run("bash", "-c", command)
    refused = _dslaunch(home, slurm.environ, *words, "run.root=third", "launcher.slurm.segment=1", status=2)
    assert "sbatch knows --segment from SLURM 24.05 on, and the one here is 22.05" in refused
    assert slurm.run("srun", "--nodes=2", "--ntasks=2", "find", str(local), "-mindepth", "1") == ""


def _job(run: Path) -> str:
    return read_state(run).slurm_job


def _until(reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + 180
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.1)
