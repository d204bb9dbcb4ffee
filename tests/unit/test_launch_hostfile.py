"""The hostfile reader: DeepSpeed's grammar, and hosts against the plan."""

from __future__ import annotations

import pytest

from dslaunch.errors import ConfigError
from dslaunch.launch.hostfile import check_hosts, parse_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1 slots=8\nn2 slots=8\n", {"n1": 8, "n2": 8}),
        ("# rack 1\n\n  n2\t slots=4  # the small one\nn1 slots=8", {"n2": 4, "n1": 8}),
        ("fe80::1 slots=2\r\nuser@h slots=1\r\n", {"fe80::1": 2, "user@h": 1}),
        ("n1 slots=8x\n", {"n1": 8}),
    ],
)
def test_good_hostfiles(text: str, hosts: dict[str, int]) -> None:
    assert list(parse_hostfile(text, "h").items()) == list(hosts.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "h: names no host"),
        ("# nothing\n\n", "h: names no host"),
        ("n1 slots=8\nn2 lots=8\n", "h:2: 'n2 lots=8' is no line of a hostfile"),
        ("n1\n", "h:1: 'n1' is no line"),
        ("n1 slots=\n", "is no line"),
        ("n1 slots = 8\n", "is no line"),
        ("-oProxyCommand=id slots=8\n", "h:1: '-oProxyCommand=id' is no host name"),
        ("n1,n2 slots=8\n", "is no host name"),
        ("u@-oX slots=8\n", "is no host name"),
        ("n1 slots=8\n\nn1 slots=8\n", "h:3: host n1 stands here for the second time"),
    ],
)
def test_bad_hostfiles(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_hostfile(text, "h")
    assert caught.value.status == 2


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"n1": 8}, "names 1 hosts, but the plan has 2 nodes"),
        ({"n1": 8, "n2": 8, "n3": 8}, "names 3 hosts"),
        ({"n1": 8, "n2": 4}, "n2 has slots=4, but the plan uses 8 GPUs"),
    ],
)
def test_hosts_that_do_not_fit_the_plan(hosts: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_hosts(hosts, nodes=2, gpus_per_node=8, where="h")


def test_hosts_that_fit() -> None:
    check_hosts({"n1": 8, "n2": 16}, nodes=2, gpus_per_node=8, where="h")
