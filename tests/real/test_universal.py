"""A script of a user's own on DeepSpeed: its ZeRO checkpoint is converted for other ranks; the losses go on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslaunch.run.records import read_ranks
from tests.real.chaos import processes_of
from tests.real.hosts import Hosts
from tests.real.parts import need
from tests.real.test_elastic_ssh import Elastic
from tests.real.test_elastic_ssh import hosts as hosts  # a fixture

need("torch", "deepspeed")

PROGRAM = Path(__file__).with_name("universal_train.py")
_LIMIT_S = 300.0
_STEPS = 30
_TRAINING = (
    "recipe=vla_tiny", "engine=deepspeed", "module=", f"script={PROGRAM}", f"training.steps={_STEPS}",
    "training.global_batch=12", "training.micro_batch=2", "training.optimizer.lr=1e-2",
    "training.optimizer.warmup_steps=4", "env.OMP_NUM_THREADS=1", f"env.PYTHONPATH={PROGRAM.parents[2]}",
    "--skip-preflight",
)  # fmt: skip
_ALONE = ("cluster=local", "cluster.gpus_per_node=1", "launcher=torchrun", "run.root=alone")
_HOSTS = (
    "cluster=local", "cluster.local=false", "cluster.nodes=2", "cluster.gpus_per_node=1",
    "cluster.network={kind: ethernet, gb_per_s: 0.1, latency_us: 50, source: none}", "cluster.hosts=[n1,n2]",
    "launcher=ssh", f"launcher.python={sys.executable}", "checkpoint.every=2", "restart.wait_s=0.2", "-y",
    "restart.elastic=true", "launcher.lost_after_s=8",
)  # fmt: skip


def _kill_rank(run: Path, rank: int, hosts: Hosts) -> None:
    (host,) = [each.host for each in read_ranks(run / "ranks") if each.rank == rank]
    on_host = next(each for each in hosts.hosts if each.name == host).processes()
    (pid,) = [pid for pid, words in on_host.items() if PROGRAM.name in words and "bash" not in words]
    os.kill(pid, signal.SIGKILL)


def _losses(elastic: Elastic, root: str) -> dict[int, float]:
    path = next((elastic.home / root).glob("*/losses"))
    return {int(step): float(loss) for step, loss, _ in map(str.split, path.read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_losses_go_on_with_fewer_ranks_and_with_more(zero: int, tmp_path: Path, hosts: Hosts) -> None:
    """Two ranks, one, two: as one alone. The last restart, of the same ranks, is converted likewise."""
    elastic = Elastic(tmp_path, {**hosts.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    words = (*_TRAINING, f"strategy=zero{zero}")
    try:
        alone = elastic.dslaunch("launch", *words, *_ALONE, "--", str(_STEPS))
        output, _ = alone.communicate(timeout=_LIMIT_S)
        assert alone.returncode == 0, output
        subnet = hosts.hosts[0].address.rpartition(".")[0] + ".0/24"
        process = elastic.dslaunch("launch", *words, *_HOSTS, f"launcher.subnet={subnet}", "--", str(_STEPS))
        elastic.wait(lambda: bool(elastic.rows()), process, _LIMIT_S)
        (elastic.run / "slow").touch()
        _wait(elastic, 4, 2, process)
        hosts.hosts[1].cut()
        _wait(elastic, 7, 1, process)
        hosts.hosts[1].restore()
        _kill_rank(elastic.run, 0, hosts)
        _wait(elastic, 11, 2, process)
        _kill_rank(elastic.run, 0, hosts)
        (elastic.run / "slow").unlink()
        output, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        elastic.end()
    assert process.returncode == 0, output
    shrunk, grown = elastic.events("replanned")
    assert (shrunk["world_size"], grown["world_size"]) == (1, 2)
    made = elastic.events("converted")
    assert [each["attempt"] for each in made] == [2, 3, 4]
    assert all(Path(each["source"] + "_universal") == Path(each["target"]) for each in made)
    left = [path.name for path in (elastic.run / "checkpoints").glob("global_step*_universal")]
    assert left == [Path(made[-1]["target"]).name], "those that nobody loads any more are gone"
    found = _losses(elastic, "runs")
    assert sorted(found) == list(range(1, _STEPS + 1))
    assert found == pytest.approx(_losses(elastic, "alone"), rel=1e-5)
    assert not processes_of(elastic.run)


def _wait(elastic: Elastic, step: int, world: int, process: subprocess.Popen[str]) -> None:
    """Until `world` ranks have completed that step."""
    elastic.wait(lambda: any(at >= step and size == world for at, _, size in elastic.rows()), process, _LIMIT_S)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_converted_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """A run that loads universal checkpoints is resumed, and a file of the newest is damaged."""
    home = Elastic(tmp_path, {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    words = (*_TRAINING, "strategy=zero1", "cluster=local", "launcher=torchrun", "checkpoint.universal=true")
    started = home.dslaunch("launch", *words, "restart.max=0", "--", str(_STEPS))
    home.wait(lambda: any(at >= 5 for at, _, _ in home.rows()), started, _LIMIT_S)
    stopping = home.dslaunch("stop", home.run.name)
    assert stopping.wait(_LIMIT_S) == 0
    started.wait(_LIMIT_S)
    newest = home.run / "checkpoints" / (home.run / "checkpoints" / "latest").read_text()
    saved = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(saved, tmp_path / "kept")
    saved.write_bytes(b"no checkpoint")
    refused = home.dslaunch("resume", home.run.name, "--skip-preflight")
    said, _ = refused.communicate(timeout=_LIMIT_S)
    assert refused.returncode == 1, said
    assert f"{newest} was not converted for other ranks" in said
    assert "universal.log" in said
    shutil.copy(tmp_path / "kept", saved)
    time.sleep(0.1)
    resumed = home.dslaunch("resume", home.run.name, "--skip-preflight")
    said, _ = resumed.communicate(timeout=_LIMIT_S)
    assert resumed.returncode == 0, said
    assert f"{newest.name} is converted for other ranks" in said
    assert sorted({at for at, _, _ in home.rows()}) == list(range(1, _STEPS + 1))
