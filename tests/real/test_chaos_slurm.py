"""Chaos inside jobs that sbatch took: each fault ends as the policy says, and SLURM's own faults likewise.

Three nodes of one GPU: a job has two, and one is spare.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.run.processes import children_of
from dslaunch.run.state import read_state
from tests.real.chaos import FAULTS, LIMIT_S, SEEDS, SLURM_FAULTS, Chaos, Fault, Site, processes_of
from tests.real.chaos_table import Trial
from tests.real.chaos_table import trial as trial  # a fixture
from tests.real.parts import need
from tests.real.slurm import SlurmCluster, slurm_cluster
from tests.real.test_chaos import chaos as chaos
from tests.real.test_chaos import checkpoints as checkpoints  # fixtures
from tests.real.test_chaos import nothing_saved_was_done_again

WORDS = (
    "recipe=vla_tiny", "cluster=2x1xA100", "training.micro_batch=1", "launcher=slurm", "--wait",
    "launcher.slurm.exclusive=false", "launcher.slurm.cpus_per_task=1", "launcher.slurm.signal_before_s=0",
)  # fmt: skip
SETTINGS = (
    "SlurmdTimeout=30", "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=n1,n2,n3 PriorityTier=10 State=UP",
)  # fmt: skip
_QUICK = {"rank killed", "rank frozen", "configuration wrong", "job preempted"}
"""One of each kind; the rest is marked slow."""


def _cases() -> Iterator[object]:
    for fault in (*FAULTS, *SLURM_FAULTS):
        for seed in SEEDS if "slurm" in fault.launchers else ():
            marks = [] if seed == 1 and fault.name in _QUICK else [pytest.mark.slow]
            yield pytest.param(fault, "slurm", seed, marks=marks, id=f"{fault.name}-{seed}".replace(" ", "-"))


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SlurmCluster]:
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    with slurm_cluster(3, 1, SETTINGS) as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: SlurmCluster, checkpoints: Path) -> Iterator[SlurmCluster]:
    """The module's; or, for a disk that is mounted, one that starts after it, for nodes see no later mount."""
    if not os.path.ismount(checkpoints):
        yield shared_cluster
        return
    with slurm_cluster(3, 1, SETTINGS) as made:
        yield made


@pytest.fixture
def site(cluster: SlurmCluster, fault: Fault) -> Iterator[Site]:
    own = {
        "job preempted": ("launcher.slurm.requeue=2",),
        "slurmd killed": ("launcher.slurm.spare_nodes=1",),
        "time limit": (
            "launcher.slurm.requeue=9",
            "launcher.slurm.time=1",
            "launcher.slurm.signal_before_s=20",
        ),
    }
    yield Site("slurm", (*WORDS, *own.get(fault.name, ())), cluster.environ, world=2)
    for job in cluster.queue():
        cluster.run("scancel", job)
    if fault.name == "slurmd killed":
        cluster.start_node("n2")
    cluster.wait_for_idle()


@pytest.mark.parametrize(("fault", "launcher", "seed"), list(_cases()))
def test_a_fault_in_a_job_ends_as_the_policy_says(trial: Trial, chaos: Chaos, cluster: SlurmCluster) -> None:
    fault = chaos.fault
    trial.starts()
    process = chaos.launch()
    try:
        with chaos.taken_port(process):
            _strike(chaos, cluster, process)
            output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    trial.ends()
    _until(lambda: not processes_of(chaos.run))
    if fault.cause:
        assert set(chaos.causes()) == {fault.cause}, (chaos.causes(), output)
    assert process.returncode == (0 if fault.outcome in ("restarted", "unharmed") else 1), output
    if fault.outcome == "restarted":
        assert len(chaos.events("started")) > 1
    if fault.name == "slurmd killed":
        assert [event["details"]["node"] for event in chaos.events("node_left_out")] == ["n2"]
    if fault.outcome == "stopped":
        (chaos.checkpoints / "filler").unlink(missing_ok=True)
        resumed = chaos.dslaunch("resume", "--skip-preflight", "--wait", chaos.run.name)
        said, _ = resumed.communicate(timeout=LIMIT_S)
        assert resumed.returncode == 0, said
    if fault.outcome != "ended":
        assert read_state(chaos.run).status == "finished"
        assert chaos.losses() == pytest.approx(chaos.whole(), rel=1e-12)
    nothing_saved_was_done_again(chaos)
    assert not processes_of(chaos.run)
    trial.passes()


def _strike(chaos: Chaos, cluster: SlurmCluster, process: subprocess.Popen[str]) -> None:
    """What is done to the job, or to SLURM, from outside."""
    if chaos.fault.name in ("launcher killed", "supervisor killed", *(each.name for each in SLURM_FAULTS)):
        chaos.wait_until_struck(process)
    if chaos.fault.name == "launcher killed":
        for child in children_of(_guard(chaos)):
            os.kill(child.pid, signal.SIGKILL)
    if chaos.fault.name == "supervisor killed":
        os.kill(_parent(_guard(chaos)), signal.SIGKILL)
    if chaos.fault.name == "node drained":
        cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=repair")
    if chaos.fault.name == "job preempted":
        urgent = ("--partition=urgent", "--nodes=3", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 1")
        cluster.run("sbatch", *urgent)
    if chaos.fault.name == "slurmd killed":
        cluster.kill_node("n2")


def _guard(chaos: Chaos) -> int:
    return int(chaos.events("started")[-1]["details"]["pid"])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)
