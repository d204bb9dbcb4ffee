"""launcher=slurm in allocations of a real SLURM: the suite under each runner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.conformance import Conformance, Site
from tests.real.parts import need
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture

WORDS = ("recipe=vla_tiny", "cluster=2x2xA100", "launcher=slurm", "launcher.slurm.cpus_per_task=2", "-y")


def _site(slurm: SlurmCluster, *words: str) -> Site:
    salloc = (
        "salloc",
        "--quiet",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=2",
        "--gres=gpu:2",
        "--exclusive",
    )
    return Site((*WORDS, *words), slurm.environ, before=salloc, ends_all=False)


class _OnSlurm(Conformance):
    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, slurm: SlurmCluster) -> Iterator[None]:
        yield
        slurm.wait_for_idle()


class TestDirect(_OnSlurm):
    """An srun task a rank."""

    @pytest.fixture
    def site(self, slurm: SlurmCluster) -> Site:
        return _site(slurm)


class TestTorchrun(_OnSlurm):
    """An srun task a node, in which torchrun starts the ranks."""

    @pytest.fixture
    def site(self, slurm: SlurmCluster) -> Site:
        need("torch")
        return _site(slurm, "launcher.runner=torchrun")


@pytest.mark.slow
class TestDeepspeed(_OnSlurm):
    """An srun task a node, in which DeepSpeed's launcher starts the ranks."""

    @pytest.fixture
    def site(self, slurm: SlurmCluster) -> Site:
        need("deepspeed")
        return _site(slurm, "launcher.runner=deepspeed")
