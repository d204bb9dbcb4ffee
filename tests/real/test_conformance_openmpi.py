"""launcher=openmpi on two real hosts: the suite."""

from __future__ import annotations

import pytest

from tests.real.conformance import Conformance, Site
from tests.real.hosts import Hosts
from tests.real.hosts import two_hosts as two_hosts  # a fixture
from tests.real.parts import need


class TestOpenMpi(Conformance):
    """mpirun, whose daemons come to the hosts by ssh."""

    @pytest.fixture
    def site(self, two_hosts: Hosts) -> Site:
        need("openmpi")
        words = ("recipe=vla_tiny", "cluster=2x2xA100", "cluster.hosts=[n1,n2]", "launcher=openmpi", "-y")
        network = two_hosts.hosts[0].address.rsplit(".", 1)[0] + ".0/24"
        # As root, and on the test's own network: both are this test's, not the launcher's.
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ = {**two_hosts.environ, **allowed, "OMPI_MCA_oob_tcp_if_include": network}
        return Site(words, environ, hosts=two_hosts.names)
