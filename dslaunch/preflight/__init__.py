"""Before a launch: every host is asked how it is, all at once, and judged.

    ask each host -> judge each, and all beside each other -> a small collective on those in order -> the report
"""

from __future__ import annotations

import time
from dataclasses import replace

from dslaunch.preflight.asking import ask
from dslaunch.preflight.catalogue import require_known
from dslaunch.preflight.facts import Host
from dslaunch.preflight.measuring import Measured, measure
from dslaunch.preflight.report import Report, judge, unseen
from dslaunch.preflight.target import Hit, Target, Way

__all__ = ["Hit", "Measured", "Report", "Target", "Way", "preflight"]

_COLLECTIVE_S = 15.0
"""Least time for a collective to be begun: torch alone takes some seconds to import."""


def preflight(target: Target, *, collective: bool) -> tuple[Report, Measured]:
    """Ask and judge the hosts within preflight.max_seconds.

    Args:
        collective: whether the small collective is run as well, on the hosts that are in order.

    Raises:
        ConfigError: preflight.ignore names no check.
    """
    require_known(target.preflight.ignore)
    start = time.monotonic()
    hosts = ask(target, min(target.preflight.host_seconds, target.preflight.max_seconds))
    report = Report(target.hosts, judge(hosts, target), unseen(hosts, target), target.preflight.ignore)
    measured = Measured()
    left = target.preflight.max_seconds - (time.monotonic() - start)
    if reason := _no_collective(report, target, collective, left):
        report = replace(report, unseen=(*report.unseen, f"collective: {reason}"))
    else:
        measured = measure(_in_order(hosts, report), target, left)
        report = replace(report, hits=(*report.hits, *measured.hits), measured=measured.sentences)
    return replace(report, seconds=time.monotonic() - start), measured


def _in_order(hosts: tuple[Host, ...], report: Report) -> tuple[Host, ...]:
    bad = {hit.host for hit in report.blocking}
    return tuple(host for host in hosts if host.name not in bad)


def _no_collective(report: Report, target: Target, wanted: bool, left_s: float) -> str:
    """Why the collective is not run; empty where it is."""
    bad = {hit.host for hit in report.blocking}
    good = len(target.hosts) - len(bad)
    ranks = good * target.plan.cluster.gpus_per_node
    if not wanted:
        return "turned off"
    if target.container:
        return "the ranks run in a container"
    if ranks < 2 or (target.several and good < 2):
        return f"{good} of {len(target.hosts)} hosts are in order"
    if left_s < _COLLECTIVE_S:
        return f"{left_s:.0f} s of preflight.max_seconds were left"
    return ""
