"""A spare host takes the place of the one where an attempt's end began."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dslaunch.launch.spares import Hosts
from dslaunch.launch.steps import Execute
from dslaunch.planfile import SupervisionPlan
from dslaunch.run.causes import Ending, Evidence
from tests.launching import make_plan

_AGENTS = ("python", "-m", "dslaunch.launch.remote")


def _hosts(argv: tuple[str, ...] = _AGENTS, words: str = "n1= n2=0,1") -> Hosts:
    plan = make_plan(nodes=2, gpus_per_node=4, local=False)
    plan = dataclasses.replace(plan, supervision=SupervisionPlan(spares=("n8", "n9")))
    return Hosts.of(Execute(argv, Path(), {"DSLAUNCH_HOSTS": words}, Path("log")), plan)


def _ending(rank: int | None, line: str = "") -> Ending:
    return Ending("host_lost", (Evidence("launcher.log:3", line),), rank)


@pytest.mark.parametrize(
    ("ending", "after"),
    [
        (_ending(3), "n8= n2=0,1"),
        (_ending(4), "n1= n8=0,1"),
        (_ending(None, "dslaunch: n2: lost: ssh exits 255"), "n1= n8=0,1"),
        (_ending(None, "dslaunch: n22: lost: ssh exits 255"), "n1= n2=0,1"),
    ],
)
def test_the_spare_host_takes_over_place_and_devices(ending: Ending, after: str) -> None:
    assert _hosts().without(ending).variables() == {"DSLAUNCH_HOSTS": after}


def test_each_spare_host_is_used_once() -> None:
    once = _hosts().without(_ending(0))
    twice = once.without(_ending(0))
    assert twice.variables() == {"DSLAUNCH_HOSTS": "n9= n2=0,1"}
    assert twice.without(_ending(0)) == twice
    assert once.changed(twice) == ", on n9 in place of n8"


def test_other_launchers_keep_their_hosts() -> None:
    hosts = _hosts(("bash", "launch.sh"))
    assert hosts.variables() == {}
    assert hosts.without(_ending(0)) == hosts
    assert hosts.without(_ending(None, "dslaunch: n2: lost")) == hosts
