"""dslaunch.runtime on real ranks, ZeRO-1: a host is lost for good, and the loss goes on as on one alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.real.chaos import processes_of
from tests.real.hosts import Hosts
from tests.real.parts import need
from tests.real.test_elastic_ssh import Elastic
from tests.real.test_elastic_ssh import hosts as hosts  # a fixture

need("torch", "deepspeed", "sklearn")

_LIMIT_S = 400.0
_STEPS = 8
_TRAINING = (
    "recipe=vla_tiny", "strategy=zero1", f"training.steps={_STEPS}", "training.global_batch=12",
    "training.micro_batch=2", "training.optimizer.warmup_steps=2", "--skip-preflight", "env.OMP_NUM_THREADS=1",
)  # fmt: skip
_ALONE = ("cluster=local", "cluster.gpus_per_node=1", "launcher=torchrun", "run.root=alone")
_HOSTS = (
    "cluster=local", "cluster.local=false", "cluster.nodes=3", "cluster.gpus_per_node=1",
    "cluster.network={kind: ethernet, gb_per_s: 0.1, latency_us: 50, source: none}", "cluster.hosts=[n1,n2,n3]",
    "launcher=ssh", f"launcher.python={sys.executable}", "checkpoint.every=2", "restart.wait_s=0.2", "-y",
    "restart.elastic=true", "launcher.lost_after_s=8",
)  # fmt: skip


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "native"])
def test_the_losses_go_on_as_without_a_break(engine: str, tmp_path: Path, hosts: Hosts) -> None:
    elastic = Elastic(tmp_path, {**hosts.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    try:
        alone = elastic.dslaunch("launch", *_TRAINING, *_ALONE)
        output, _ = alone.communicate(timeout=_LIMIT_S)
        assert alone.returncode == 0, output
        network = hosts.hosts[0].address.rpartition(".")[0] + ".0/24"
        words = (*_TRAINING, *_HOSTS, f"engine={engine}", f"launcher.subnet={network}")
        process = elastic.dslaunch("launch", *words)
        saved = "runs/*/checkpoints/step-00000002/dslaunch.json"
        elastic.wait(lambda: any(tmp_path.glob(saved)), process, _LIMIT_S)
        hosts.hosts[2].cut()
        output, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        elastic.end()
    assert process.returncode == 0, output
    (replanned,) = elastic.events("replanned")
    assert (replanned["nodes"], replanned["world_size"], sorted(replanned["hosts"])) == (2, 2, ["n1", "n2"])
    assert "it goes on as" in output
    (whole,) = (tmp_path / "alone").iterdir()
    assert len(_losses(whole)) == _STEPS
    assert _losses(elastic.run) == pytest.approx(_losses(whole), rel=1e-5)
    assert not processes_of(elastic.run)
    assert os.listdir(elastic.run / "generations") in (["1", "2"], ["2", "1"])
