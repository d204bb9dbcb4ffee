"""Hosts with 2 and 1 slots, over real ssh: every runner gives each rank its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import HOSTILE
from tests.real.hosts import Hosts
from tests.real.hosts import two_hosts as two_hosts  # a fixture
from tests.real.parts import need

PROBE = """
import json, os, pathlib
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")
seen = {name: os.environ.get(name) for name in names}
if "--meet" in __import__("sys").argv:
    import torch.distributed as dist
    import torch
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    seen["sum"] = total.item()
    dist.destroy_process_group()
out = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]) / f"probe-{seen['RANK']}.json"
out.write_text(json.dumps({**seen, "host": os.uname().nodename}))
"""
WHAT = ["recipe=vla_tiny", "cluster=A100", "cluster.mixed=[{nodes: 1, gpus: 2}, {nodes: 1, gpus: 1}]"]
BATCH = ["training.global_batch=36", "training.micro_batch=4", "module=", "script=probe.py"]
HOW = [f"launcher.python={sys.executable}", "launcher.hostfile=hosts", "--skip-preflight", "-y"]


def _dslaunch(home: Path, hosts: Hosts, *words: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=home, env={**hosts.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def _home(folder: Path) -> Path:
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "hosts").write_text("n2 slots=1\nn1 slots=2\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["launcher.runner=torchrun"], marks=pytest.mark.slow),
        pytest.param(["launcher.runner=deepspeed"], marks=pytest.mark.slow),
        pytest.param(["launcher.transport=pdsh"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0].partition("=")[2] if words else "direct",
)
def test_each_rank_has_its_place(words: list[str], tmp_path: Path, two_hosts: Hosts) -> None:
    need("torch", "deepspeed", "pdsh")
    pdsh = "launcher.transport=pdsh" in words  # it carries plain paths alone
    home = _home(tmp_path / ("home" if pdsh else HOSTILE))
    meet = ["--", "--meet"] if words and not pdsh else []
    _dslaunch(home, two_hosts, *WHAT, *BATCH, *HOW, "launcher=ssh", *words, *meet)
    (run,) = (home / "runs").iterdir()
    found = [json.loads((run / f"probe-{rank}.json").read_text()) for rank in range(3)]
    places = [(seen["host"], seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"], seen["LOCAL_SIZE"]) for seen in found]
    assert places == [("n1", "0", "2", "2"), ("n1", "1", "2", "2"), ("n2", "0", "1", "1")]
    assert {seen["WORLD_SIZE"] for seen in found} == {"3"}
    assert {seen.get("sum") for seen in found} == {3.0 if meet else None}
    assert (run / "hosts").read_text() == "n1 slots=2\nn2 slots=1\n"
    assert two_hosts.quiet()


def test_what_cannot_be_is_refused_with_its_arithmetic(tmp_path: Path) -> None:
    home = _home(tmp_path / "home")
    here = Hosts(tmp_path, (), dict(os.environ))
    said = _dslaunch(home, here, *WHAT, *BATCH, *HOW, "launcher=openmpi", "--dry-run", status=2)
    assert "cluster.mixed) are launched over ssh and by SLURM" in said
    switches = "cluster.switches={one:[n1],two:[n2]}"
    said = _dslaunch(home, here, *WHAT, *BATCH, *HOW, "launcher=slurm", switches, "--dry-run", status=2)
    assert "cluster.switches orders the ranks, and a heterogeneous job" in said
    said = _dslaunch(home, here, "plan", *WHAT, "training.global_batch=32", "training.micro_batch=4", status=3)
    assert "global_batch 32 / (micro_batch 4 x dp 3" in said
    said = _dslaunch(home, here, "plan", *WHAT, *BATCH, "strategy.llm.tp=2", status=3)
    assert "3 GPUs = 1 x 2 + 1 x 1 A100-SXM4-80GB, planned as 3 parts of 1" in said
    (home / "hosts").write_text("n2 slots=1\nn1 slots=1\n")
    said = _dslaunch(home, here, *WHAT, *BATCH, *HOW, "launcher=ssh", "--dry-run", status=2)
    assert "its hosts have 1, 1 slots, but the plan (cluster.mixed) is for 2, 1: 2 and 3 GPUs" in said
    (home / "hosts").write_text("n2 slots=1\nn1 slots=2\n")
    alike = ["recipe=vla_tiny", "cluster=2x2xA100", "training.micro_batch=4", "module=", "script=probe.py"]
    said = _dslaunch(home, here, *alike, *HOW, "launcher=ssh", "--dry-run", status=2)
    assert "cluster=TYPE cluster.mixed=[{nodes: 1, gpus: 2}, {nodes: 1, gpus: 1}]" in said
