"""Preflight as the first step of a real SLURM job: it blocks the ranks, names the node, and is remembered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.run.state import read_state
from tests.real.parts import need
from tests.real.preflight_hosts import CLUSTER, TORCH
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture

need("slurm", "torch", "deepspeed")


@pytest.fixture
def home(tmp_path: Path, slurm: SlurmCluster) -> Iterator[Path]:
    """Where the user stands: a site with CPUs, a program, and a Python that is another one on the node n2."""
    conf = tmp_path / "site" / "conf" / "cluster"
    conf.mkdir(parents=True)
    (conf / "cpus.yaml").write_text(CLUSTER)
    (tmp_path / "train.py").write_text("import os\nprint(f'rank {os.environ[\"RANK\"]} trains', flush=True)\n")
    other = tmp_path / "other" / f"torch-{TORCH}.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n")
    for name, node in (("python", "n2"), ("good", "none")):
        script = tmp_path / name
        script.write_text(
            f'#!/bin/sh\nif [ "$SLURMD_NODENAME" = {node} ]; then export PYTHONPATH="{other.parent}"; fi\n'
            f'exec "{sys.executable}" "$@"\n'
        )
        script.chmod(0o755)
    hangs = tmp_path / "hangs"
    hangs.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && exec sleep 1000\nexec "{sys.executable}" "$@"\n')
    hangs.chmod(0o755)
    yield tmp_path
    slurm.wait_for_idle()


def _launch(home: Path, slurm: SlurmCluster, *words: str) -> tuple[int, str, Path]:
    """Exit status, output, and the run folder of a job that was waited for."""
    before = set((home / "runs").glob("*"))
    done = subprocess.run(
        [
            sys.executable, "-m", "dslaunch", "recipe=vla_tiny", "cluster=2x2xcpus", "launcher=slurm",
            "--config-dir", "site", "script=train.py", "module=", "training.micro_batch=8", "--wait",
            "preflight.ignore=[net.name,folder.full]", *words,
        ],
        env=slurm.environ, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    (run,) = set((home / "runs").glob("*-*")) - before or {home}
    return done.returncode, done.stdout, run


def test_nodes_in_order_train_and_are_not_asked_twice(home: Path, slurm: SlurmCluster) -> None:
    status, output, _ = _launch(home, slurm, "launcher.python=./good")
    assert status == 0, output
    assert "preflight passed: 2 hosts" in output
    assert "all_reduce (Gloo) over all ranks" in output
    assert "rank 3 trains" in output
    status, output, _ = _launch(home, slurm, "launcher.python=./good")
    assert status == 0, output
    assert " min ago on these 2 nodes" in output
    assert "all_reduce" not in output
    assert "rank 3 trains" in output


def test_a_node_with_another_torch_blocks_the_ranks(home: Path, slurm: SlurmCluster) -> None:
    status, output, run = _launch(home, slurm, "launcher.python=./python", "preflight.collective=false")
    assert status == 1, output
    (row,) = (line for line in output.splitlines() if "  FAIL  " in line)
    assert row.split()[:5] == ["n2", "FAIL", "version.torch:", "torch", f"{TORCH};"]
    assert "launcher.slurm.exclude=n2" in output
    assert "trains" not in output
    assert read_state(run).exit_status == 4


def test_a_node_that_hangs_costs_its_limit(home: Path, slurm: SlurmCluster) -> None:
    status, output, _ = _launch(home, slurm, "launcher.python=./hangs", "preflight.host_seconds=20")
    assert status == 1, output
    (row,) = (line for line in output.splitlines() if "  FAIL  " in line)
    assert row.split()[:3] == ["n2", "FAIL", "host.unreachable:"]
    assert "trains" not in output
    slurm.wait_for_idle()


def test_skipping_it_is_said(home: Path, slurm: SlurmCluster) -> None:
    status, output, _ = _launch(home, slurm, "launcher.python=./python", "--skip-preflight")
    assert status == 0, output
    assert "preflight is left out; not checked: the machine, GPUs, versions" in output
    assert "rank 3 trains" in output
