"""launcher=ssh on two real hosts: the suite under each runner, and what ssh alone can get wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.real.conformance import Conformance, Site
from tests.real.hosts import Hosts
from tests.real.hosts import two_hosts as two_hosts  # a fixture
from tests.real.parts import need

WORDS = ("recipe=vla_tiny", "cluster=2x2xA100", "cluster.hosts=[n1,n2]", "launcher=ssh", "-y")


def _site(hosts: Hosts, *words: str) -> Site:
    return Site((*WORDS, *words), hosts.environ, hosts=hosts.names)


class TestDirect(Conformance):
    """dslaunch's agents start each rank."""

    @pytest.fixture
    def site(self, two_hosts: Hosts) -> Site:
        return _site(two_hosts)


class TestTorchrun(Conformance):
    """torchrun once on each host."""

    @pytest.fixture
    def site(self, two_hosts: Hosts) -> Site:
        need("torch")
        return _site(two_hosts, "launcher.runner=torchrun")


class TestPdsh(Conformance):
    """DeepSpeed's own multi-node launcher over pdsh."""

    @pytest.fixture
    def site(self, two_hosts: Hosts) -> Site:
        need("deepspeed", "pdsh")
        site = _site(two_hosts, "launcher.transport=pdsh")
        return replace(site, plain_paths=True, passes_secrets=False)


@pytest.mark.slow
class TestDeepspeed(Conformance):
    """DeepSpeed's launcher once on each host, without pdsh."""

    @pytest.fixture
    def site(self, two_hosts: Hosts) -> Site:
        need("deepspeed")
        return _site(two_hosts, "launcher.runner=deepspeed")
