"""launcher=local: the suite under both runners of one machine."""

from __future__ import annotations

import os

import pytest

from tests.real.conformance import Conformance, Site
from tests.real.parts import need

WORDS = ("recipe=vla_tiny", "cluster=local", "launcher=local")


@pytest.mark.slow
class TestDeepspeed(Conformance):
    """DeepSpeed's launcher."""

    @pytest.fixture
    def site(self) -> Site:
        need("deepspeed")
        return Site(WORDS, os.environ, nodes=1)


@pytest.mark.slow
class TestTorchrun(Conformance):
    """torchrun."""

    @pytest.fixture
    def site(self) -> Site:
        need("torch")
        return Site((*WORDS, "launcher.runner=torchrun"), os.environ, nodes=1)
