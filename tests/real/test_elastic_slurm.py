"""A node of the allocation dies, and no spare one waits: the job goes on with the others, and so does its loss."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dslaunch.run.state import read_events, read_state
from tests.real.chaos import HOST_GONE, Fault, dice, processes_of, seeded
from tests.real.chaos_table import Trial
from tests.real.chaos_table import trial as trial  # a fixture
from tests.real.elastic_train import curve
from tests.real.parts import need
from tests.real.slurm import slurm_cluster
from tests.real.test_elastic_ssh import PROGRAM, Elastic

_STEPS, _BATCH = 200, 12
_WORDS = (
    "recipe=vla_tiny", "cluster=3x1xA100", "launcher=slurm", "--wait", "launcher.slurm.exclusive=false",
    "launcher.slurm.cpus_per_task=1", "engine=torch", "strategy=ddp", "module=", f"script={PROGRAM}",
    f"launcher.python={sys.executable}", f"training.global_batch={_BATCH}", "training.micro_batch=2",
    "checkpoint.every=2", "restart.wait_s=0.2", "restart.elastic=true", f"env.PYTHONPATH={PROGRAM.parents[2]}",
    "--skip-preflight", "--", str(_STEPS),
)  # fmt: skip


@pytest.mark.parametrize(("fault", "launcher", "seed"), seeded(HOST_GONE, "slurm", quick=False))
def test_a_job_goes_on_with_the_nodes_that_are_left(
    trial: Trial, fault: Fault, seed: int, tmp_path: Path
) -> None:
    """The first node, which the batch script runs on, is not one of those that die."""
    draw = dice(fault, seed)
    step, dies = draw.randrange(3, 9), draw.choice(["n2", "n3"])
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    with slurm_cluster(3, 1, ("SlurmdTimeout=30",)) as cluster:
        job = Elastic(tmp_path, cluster.environ)
        trial.starts()
        process = job.dslaunch("launch", *_WORDS)
        try:
            job.wait_for_step(step, 3, process)
            cluster.kill_node(dies)
            output, _ = process.communicate(timeout=300)
        finally:
            job.end()
        trial.ends()
        assert process.returncode == 0, output
        (replanned,) = job.events("replanned")
        assert (replanned["nodes"], replanned["world_size"]) == (2, 2)
        assert replanned["why"] == f"host_lost: {dies} left out"
        assert read_state(job.run).status == "finished"
        job.check_losses(curve(_STEPS, _BATCH))
        assert [world for _, _, world in job.rows()][-1] == 2
        assert not processes_of(job.run)
        assert [event["kind"] for event in read_events(job.run)].count("started") == 2
    trial.passes()
