"""A node of the allocation dies, and no spare one waits: the job goes on with the others, and so does its loss."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from dslaunch.run.state import read_events, read_state
from tests.real.chaos import HOST_GONE, processes_of
from tests.real.chaos_table import note, write_table
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


@pytest.mark.slow
def test_a_job_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    with slurm_cluster(3, 1, ("SlurmdTimeout=30",)) as cluster:
        job = Elastic(tmp_path, cluster.environ)
        began = time.monotonic()
        process = job.dslaunch("launch", *_WORDS)
        try:
            job.wait_for_step(3, 3, process)
            cluster.kill_node("n2")
            output, _ = process.communicate(timeout=300)
        finally:
            job.end()
        assert process.returncode == 0, output
        (replanned,) = job.events("replanned")
        assert (replanned["nodes"], replanned["world_size"]) == (2, 2)
        assert replanned["why"] == "host_lost: n2 left out"
        assert read_state(job.run).status == "finished"
        job.check_losses(curve(_STEPS, _BATCH))
        assert [world for _, _, world in job.rows()][-1] == 2
        assert not processes_of(job.run)
        assert [event["kind"] for event in read_events(job.run)].count("started") == 2
    note(HOST_GONE, "slurm", time.monotonic() - began)
    if os.environ.get("DSLAUNCH_CHAOS_TABLE"):
        write_table()
