"""Heterogeneous jobs of a real SLURM: hosts of two kinds, in two partitions, under one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.run.state import read_events, read_state
from tests.launching import HOSTILE
from tests.real.conformance import Conformance, Site
from tests.real.parts import need
from tests.real.preflight_hosts import CLUSTER
from tests.real.slurm import SlurmCluster, slurm_cluster

KINDS = "cluster.mixed=[{nodes: 1, gpus: 2, partition: big}, {nodes: 2, gpus: 1, partition: small}]"
BATCH = ("training.global_batch=48", "training.micro_batch=4", "module=")
WHAT = ("recipe=vla_tiny", "cluster=A100", KINDS, *BATCH, "launcher=slurm", "launcher.slurm.cpus_per_task=1", "-y")
PROGRAM = """
import json, os, pathlib, socket, sys, time
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURMD_NODENAME",
         "CUDA_VISIBLE_DEVICES")
run, attempt = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]), os.environ["DSLAUNCH_ATTEMPT"]
path = run / f"probe-{os.environ['RANK']}-{attempt}.json"
path.write_text(json.dumps({**{name: os.environ.get(name) for name in names}, "cwd": os.getcwd()}))
if "--sleep" in sys.argv and not (run / "go").exists():
    time.sleep(1000)
if "--fail" in sys.argv and (os.environ["RANK"], attempt) == ("3", "1"):
    written = lambda: [each for each in run.glob(f"probe-*-{attempt}.json") if each.stat().st_size]
    while len(written()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.1)
    sys.exit(7)
"""
PARTITIONS = {"big": "n[3-4]", "small": "n[1-2,5]"}
"""The hosts that have the first ranks are not the first by name."""
ORDER = [
    ("n3", "0", "0", "2", "0,1"),
    ("n3", "1", "0", "2", "0,1"),
    ("n1", "0", "1", "1", "0"),
    ("n2", "0", "2", "1", "0"),
]
"""(node, LOCAL_RANK, NODE_RANK, LOCAL_WORLD_SIZE, GPUs) of each rank."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """2 nodes in the partition big, 3 in small, each with 2 GPUs and a disk of its own."""
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    partitions = [f"PartitionName={name} Nodes={nodes} State=UP" for name, nodes in PARTITIONS.items()]
    with slurm_cluster(5, 2, partitions, private=(tmp_path_factory.mktemp("disk"),)) as cluster:
        yield cluster


@pytest.fixture
def home(tmp_path: Path, kinds: SlurmCluster) -> Iterator[Path]:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "probe.py").write_text(PROGRAM)
    yield folder
    for job in kinds.queue():
        kinds.run("scancel", job, check=False)  # the leading component's id is for all
    kinds.wait_for_idle()


def _dslaunch(home: Path, kinds: SlurmCluster, *words: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=home, env=kinds.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def _launch(home: Path, kinds: SlurmCluster, *words: str, script: tuple[str, ...] = ()) -> str:
    what = [word for word in WHAT if word != "cluster=A100" or "cluster=cpus" not in words]
    how = ["script=probe.py", f"launcher.python={sys.executable}"]
    how += [] if any(word.startswith("preflight.") for word in words) else ["--skip-preflight"]
    return _dslaunch(home, kinds, *what, *how, *words, "--", *script)


def _run(home: Path) -> Path:
    (run,) = (home / "runs").glob("vla_tiny-*")
    return run


def _placed(run: Path, attempt: int = 1) -> list[tuple[str, ...]]:
    """As ORDER; all meet at the host of the first."""
    paths = sorted(run.glob(f"probe-*-{attempt}.json"))
    probes: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
    assert [probe["RANK"] for probe in probes] == ["0", "1", "2", "3"]
    assert {(probe["MASTER_ADDR"], probe["WORLD_SIZE"]) for probe in probes} == {("n3", "4")}
    names = ("SLURMD_NODENAME", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    return [tuple(probe[name] for name in names) for probe in probes]


def _until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_a_rank_that_fails_is_started_again_in_the_job_and_the_chain_ends(home: Path, kinds: SlurmCluster) -> None:
    """The supervisor in the job, its preflight over both components, and a continuation that is not needed."""
    need("torch")
    conf = home / "site" / "conf" / "cluster"
    conf.mkdir(parents=True)
    (conf / "cpus.yaml").write_text(CLUSTER)
    said = _launch(
        home, kinds, "cluster=cpus", "--config-dir", "site", "restart.max=1", "restart.wait_s=0",
        "launcher.slurm.continuations=1", "preflight.ignore=[net.name,folder.full,collective.slow]", "--wait",
        script=("--fail",),
    )  # fmt: skip
    run = _run(home)
    assert "all_reduce (Gloo) over all ranks" in said
    assert "preflight passed: 3 hosts" in said
    assert [_placed(run, attempt) for attempt in (1, 2)] == [[(*place[:4], None) for place in ORDER]] * 2
    events = read_events(run)
    (started,) = [event["details"] for event in events if event["kind"] == "job_started"]
    assert started["nodes"] == "n3,n[1-2]"
    (ended,) = [event["details"] for event in events if event["kind"] == "attempt_ended"]
    assert (ended["cause"], ended["exit_status"]) == ("program", 7)
    assert read_state(run).status == "finished"
    assert kinds.queue() == []


@pytest.mark.slow
def test_a_job_is_put_back_stopped_and_resumed(home: Path, kinds: SlurmCluster) -> None:
    """From other shells, by the run's name."""
    _launch(home, kinds, "launcher.slurm.requeue=1", script=("--sleep",))
    run = _run(home)
    _until(lambda: len(list(run.glob("probe-*-1.json"))) == 4)
    status = _dslaunch(home, kinds, "status", run.name)
    assert "vla_tiny on 1 x 2 + 2 x 1 A100-SXM4-80GB, 4 ranks" in status
    assert "running" in status
    job = read_state(run).slurm_job
    kinds.run("scontrol", "requeue", job)

    def started_again() -> bool:
        # Only backfill starts it, which looks once something has changed; the end of a job's wait is no change.
        kinds.run("scontrol", "update", f"jobid={job}", "comment=again")
        return len(list(run.glob("probe-*-2.json"))) == 4

    _until(started_again)
    assert _placed(run, 2) == ORDER
    _dslaunch(home, kinds, "stop", run.name)
    _until(lambda: kinds.queue() == [])
    assert "stopped" in _dslaunch(home, kinds, "status", run.name)
    (run / "go").touch()
    _dslaunch(home, kinds, "resume", run.name, "--from-scratch", "--skip-preflight", "--wait")
    assert _placed(run, 3) == ORDER
    assert read_state(run).status == "finished"


def test_slurm_judges_it_and_a_sweep_is_a_job_a_run(home: Path, kinds: SlurmCluster) -> None:
    assert "to start at" in _launch(home, kinds, "--test-only")
    said = _launch(home, kinds, "--multirun", "training.seed=1,2", script=("--sleep",))
    jobs = [read_state(path).slurm_job for path in (home / "runs").iterdir() if path.suffix]
    assert [f"job {job} submitted" in said for job in jobs] == [True, True]
    assert [kinds.job(job)["HetJobOffset"] for job in jobs] == ["1", "1"]  # of its last component


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torchrun", "deepspeed"])
def test_a_runner_on_each_node_starts_its_ranks(runner: str, home: Path, kinds: SlurmCluster) -> None:
    need("torch", "deepspeed")
    _launch(home, kinds, f"launcher.runner={runner}", "--wait")
    assert [(node, local, size) for node, local, _, size, _ in _placed(_run(home))] == [
        (node, local, size) for node, local, _, size, _ in ORDER
    ]


@pytest.mark.slow
def test_code_is_staged_to_the_nodes_of_every_component(home: Path, kinds: SlurmCluster) -> None:
    (disk,) = kinds.private
    _launch(home, kinds, "launcher.stage.from=.", f"launcher.stage.to={disk}", "--wait")
    run = _run(home)
    assert _placed(run) == ORDER
    seen = [json.loads((run / f"probe-{rank}-1.json").read_text())["cwd"] for rank in range(4)]
    assert {str(Path(cwd).parent) for cwd in seen} == {str(disk)}
    staged = [event["details"] for event in read_events(run) if event["kind"] in ("staged", "unstaged")]
    assert [each.get("nodes", each.get("from")) for each in staged] == ["n3,n[1-2]", "every node"]


@pytest.mark.slow
class TestConformance(Conformance):
    """In a heterogeneous allocation, an srun task a rank."""

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, kinds: SlurmCluster) -> Iterator[None]:
        yield
        kinds.wait_for_idle()

    @pytest.fixture
    def site(self, kinds: SlurmCluster) -> Site:
        component = ("--cpus-per-task=2", "--exclusive")
        salloc = (
            "salloc", "--quiet", "--nodes=1", "--ntasks-per-node=2", "--gres=gpu:2", "--partition=big", *component,
            ":", "--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1", "--partition=small", *component,
        )  # fmt: skip
        mixed = "cluster.mixed=[{nodes: 1, gpus: 2, partition: big}, {nodes: 1, gpus: 1, partition: small}]"
        words = [word for word in WHAT if not word.startswith("cluster.mixed")]
        return Site((*words, mixed), kinds.environ, slots=(2, 1), before=salloc, ends_all=False)
