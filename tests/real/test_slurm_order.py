"""The order of nodes, and so of ranks, under a real SLURM whose leaf switches cut across the nodes' names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import HOSTILE
from tests.real.parts import need
from tests.real.slurm import SlurmCluster, slurm_cluster

LEAVES = {"odd": "n[1,3,5]", "even": "n[2,4]"}
SWITCHES = "cluster.switches={odd:['n[1,3,5]'],even:['n[2,4]']}"
PROBE = """
import json, os, pathlib, sys, time
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
name = f"probe-{os.environ['RANK']}-{os.environ['DSLAUNCH_ATTEMPT']}.json"
out = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"], name)
out.write_text(json.dumps({name: os.environ.get(name) for name in names}))
if os.environ["RANK"] == "1" and os.environ["DSLAUNCH_ATTEMPT"] == "1" and "--fail" in sys.argv:
    written = lambda: [each for each in out.parent.glob("probe-*-1.json") if each.stat().st_size]
    while len(written()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.1)
    print("CUDA error: uncorrectable ECC error encountered", flush=True)
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def tree() -> Iterator[SlurmCluster]:
    """5 nodes x 2 GPUs, and the plugin topology/tree with two leaves under a spine."""
    need("slurm")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on one host is started as root")
    rows = [f"SwitchName={leaf} Nodes={names}" for leaf, names in LEAVES.items()]
    topology = "\n".join([*rows, "SwitchName=spine Switches=odd,even"]) + "\n"
    with slurm_cluster(5, 2, ["TopologyPlugin=topology/tree"], {"topology.conf": topology}) as cluster:
        yield cluster


@pytest.fixture
def home(tmp_path: Path, tree: SlurmCluster) -> Iterator[Path]:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    yield folder
    for job in tree.queue():
        tree.run("scancel", job)
    tree.wait_for_idle()


def _launch(home: Path, tree: SlurmCluster, *words: str, nodes: int = 4, script: tuple[str, ...] = ()) -> Path:
    what = ["recipe=vla_tiny", f"cluster={nodes}x2xA100", "module=", "script=probe.py", "launcher=slurm", "--wait"]
    batch = ["training.global_batch=120", "training.micro_batch=1"]
    how = [f"launcher.python={sys.executable}", "--skip-preflight", "launcher.slurm.cpus_per_task=1", *batch]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *what, *how, *words, "--", *script],
        cwd=home, env=tree.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (home / "runs").iterdir()
    return run


def _placed(run: Path, attempt: int = 1) -> list[tuple[str, ...]]:
    """(node, LOCAL_RANK, NODE_RANK) of each rank, in rank order; all meet at rank 0's node."""
    probes: list[dict[str, Any]] = [json.loads(path.read_text()) for path in run.glob(f"probe-*-{attempt}.json")]
    probes.sort(key=lambda probe: int(probe["RANK"]))
    assert {probe["MASTER_ADDR"] for probe in probes} == {probes[0]["SLURMD_NODENAME"]}
    assert {probe["WORLD_SIZE"] for probe in probes} == {str(len(probes))}
    return [(probe["SLURMD_NODENAME"], probe["LOCAL_RANK"], probe["NODE_RANK"]) for probe in probes]


def _in_order(*nodes: str) -> list[tuple[str, ...]]:
    return [(node, str(local), str(at)) for at, node in enumerate(nodes) for local in range(2)]


@pytest.mark.parametrize("runner", ["direct", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_fill_one_leaf_switch_after_the_other(runner: str, home: Path, tree: SlurmCluster) -> None:
    need("torch")
    run = _launch(home, tree, SWITCHES, f"launcher.runner={runner}", "launcher.slurm.exclude=n5")
    found = _placed(run)
    assert [(node, local) for node, local, _ in found] == [
        (node, local) for node, local, _ in _in_order("n1", "n3", "n2", "n4")
    ]
    if runner == "direct":
        assert found == _in_order("n1", "n3", "n2", "n4")


@pytest.mark.slow
def test_slurm_itself_is_asked_for_its_topology(home: Path, tree: SlurmCluster) -> None:
    run = _launch(home, tree, "launcher.slurm.rank_order=switches", "launcher.slurm.switches=2", nodes=5)
    placed = [node for node, local, _ in _placed(run) if local == "0"]
    leaves = [node in ("n1", "n3", "n5") for node in placed]
    assert leaves in ([True] * 3 + [False] * 2, [False] * 2 + [True] * 3)
    job = next(event for event in (run / "events.jsonl").read_text().splitlines() if "submitted" in event)
    assert tree.job(json.loads(job)["details"]["job"])["Switches"].startswith("2")


@pytest.mark.slow
def test_a_spare_node_keeps_the_order(home: Path, tree: SlurmCluster) -> None:
    """Rank 1's node is left out; those of its leaf go on before those of the other."""
    run = _launch(
        home, tree, SWITCHES, "launcher.slurm.spare_nodes=2", "restart.max=1", "restart.wait_s=0", nodes=3,
        script=("--fail",),
    )  # fmt: skip
    assert _placed(run) == _in_order("n1", "n3", "n5")
    assert _placed(run, 2) == _in_order("n3", "n5", "n2")
