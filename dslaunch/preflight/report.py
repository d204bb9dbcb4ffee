"""What preflight came to: findings by host, a table, and the hosts to leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dslaunch.preflight import checks_gpus, checks_machine, checks_places, checks_software
from dslaunch.preflight.catalogue import checks
from dslaunch.preflight.facts import Host
from dslaunch.preflight.target import Hit, Target

REPORT_SCHEMA = "dslaunch.preflight-report/1"
_PER_HOST = (*checks_machine.PER_HOST, *checks_gpus.PER_HOST, *checks_software.PER_HOST, *checks_places.PER_HOST)
_ACROSS = (*checks_machine.ACROSS, *checks_gpus.ACROSS, *checks_software.ACROSS, *checks_places.ACROSS)
_NAMED = 8
"""Hosts that a line names before it counts them."""


@dataclass(frozen=True)
class Report:
    hosts: tuple[str, ...]
    hits: tuple[Hit, ...]
    """In the order of the hosts."""
    unseen: tuple[str, ...]
    """What was not checked, and why, one sentence each."""
    ignored: tuple[str, ...]
    """preflight.ignore"""
    measured: tuple[str, ...] = ()
    """Bandwidths, one sentence each."""
    seconds: float = 0.0

    @property
    def blocking(self) -> tuple[Hit, ...]:
        return tuple(hit for hit in self.hits if self.stops(hit))

    def stops(self, hit: Hit) -> bool:
        return checks()[hit.check].severity == "error" and hit.check not in self.ignored

    @property
    def excluded(self) -> tuple[str, ...]:
        """Hosts to leave out, in rank order; none where what is wrong is wrong on all of them."""
        bad = {hit.host for hit in self.blocking}
        found = tuple(host for host in self.hosts if host in bad)
        return found if len(found) < len(self.hosts) else ()


def judge(hosts: Sequence[Host], target: Target) -> tuple[Hit, ...]:
    """Every check on every host, in the order of the hosts."""
    found: list[Hit] = []
    for host in hosts:
        for check in _PER_HOST:
            found += check(host, target)
    for across in _ACROSS:
        found += across(hosts, target)
    order = {host.name: index for index, host in enumerate(hosts)}
    return tuple(sorted(found, key=lambda hit: order[hit.host]))


def unseen(hosts: Sequence[Host], target: Target) -> tuple[str, ...]:
    """What could not be looked at, and why; hosts that did not answer are findings, and not repeated here."""
    seen = [host for host in hosts if host.answered]
    if not seen:
        return ()
    return tuple(_unseen(seen, target))


def _unseen(hosts: Sequence[Host], target: Target) -> Iterator[str]:
    if not target.gpus:
        yield "GPUs: the plan uses none"
    elif target.plan.cluster.accelerator != "cuda":
        yield "GPUs: only NVIDIA's are looked at"
    else:
        without = [host.name for host in hosts if host.gpus.found is None and not host.gpus.fault]
        if without:
            yield f"GPUs' type, health and processes: nvidia-smi is not installed on {_listed(without)}"
    if closed := [host.name for host in hosts if host.events is None]:
        yield f"kernel messages (Xid, memory, disks): dmesg may not be read on {_listed(closed)}"
    if target.preflight.infiniband and (blind := [host.name for host in hosts if host.ports is None]):
        yield f"InfiniBand ports: ibstat is not installed on {_listed(blind)}"
    if target.container:
        yield "versions and code: the ranks run in a container"
    if target.way == "srun":
        yield "clocks: srun does not say when a node spoke"
    if target.several and (alone := checks_places.names_of_ssh(hosts, target)):
        yield f"names: no host knows {_listed(alone)}"


def table(report: Report) -> list[str]:
    """A line for each finding with its hosts, those that stop a launch first; then what is in order."""
    rows: dict[tuple[bool, str, str], list[str]] = {}
    for hit in report.hits:
        rows.setdefault((not report.stops(hit), hit.check, hit.found), []).append(hit.host)
    hosts = {row: _listed(found) for row, found in rows.items()}
    width = max(map(len, hosts.values()), default=0)
    lines = [
        f"{hosts[row]:<{width}}  {'warn' if row[0] else 'FAIL'}  {row[1]}: {row[2]}"
        for row in sorted(rows, key=lambda row: row[0])
    ]
    named = {hit.host for hit in report.hits}
    if good := [host for host in report.hosts if host not in named]:
        lines.append(f"in order: {_listed(good)}")
    return [*lines, *report.measured, *(f"not checked: {each}" for each in report.unseen)]


def fixes(report: Report) -> list[str]:
    """What to do, once for each check that failed."""
    stopping = dict.fromkeys(hit.check for hit in report.blocking)
    return [f"{id}: {checks()[id].about}. {checks()[id].fix}" for id in stopping]


def as_data(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "schema": REPORT_SCHEMA,
        "hosts": report.hosts,
        "findings": [
            {
                "check": hit.check,
                "host": hit.host,
                "severity": checks()[hit.check].severity,
                "stops": report.stops(hit),
                "found": hit.found,
                "fix": checks()[hit.check].fix,
            }
            for hit in report.hits
        ],
        "exclude": report.excluded,
        "measured": report.measured,
        "not_checked": report.unseen,
        "seconds": round(report.seconds, 3),
    }


def _listed(hosts: Iterable[str]) -> str:
    names = list(hosts)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
