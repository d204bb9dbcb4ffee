"""What a host must be as a machine: reached, awake, with room in memory and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslaunch.preflight.common import most_common
from dslaunch.preflight.facts import Host
from dslaunch.preflight.target import Hit, Target

_MIB, _GIB = 2**20, 2**30
_CONTAINER_SHM = 64 * _MIB
"""Docker's default size of /dev/shm."""
_MEMLOCK = _GIB
_NOFILE = 4096
_DAY_S = 86400.0
_BUSY = 1.5
"""Load per core."""


HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    64: "a bad memory row could not be mapped out",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP fault",
    140: "uncorrected memory error",
}
"""Xids after which the GPU is to be reset (docs.nvidia.com/deploy/xid-errors, catalog for Ampere and newer)."""


def answers(host: Host, target: Target) -> Iterator[Hit]:
    if not host.reached:
        yield Hit("host.unreachable", host.name, host.fault)
    elif host.no_python:
        yield Hit("host.python", host.name, f"{target.python}: {host.fault}")
    elif host.fault:
        yield Hit("host.probe", host.name, host.fault)
    if host.silent:
        yield Hit("host.silent", host.name, f"no answer about {', '.join(host.silent)}")
    for part, why in host.failed.items():
        yield Hit("host.probe", host.name, f"{part}: {why}")


def room(host: Host, target: Target) -> Iterator[Hit]:
    """Memory, /dev/shm and limits; of other machines than this one also their load."""
    if not host.system:
        return
    limits, shm = host.system["limits"], host.system["shm"]["size"]
    free = host.system["memory_available"] / _GIB
    if free < target.host_memory_gib:
        yield Hit("host.memory", host.name, f"{free:.1f} GiB free, {target.host_memory_gib:.1f} GiB planned")
    if target.gpus and shm <= _CONTAINER_SHM:
        yield Hit("host.shm", host.name, f"/dev/shm has {shm / _MIB:.0f} MiB")
    if target.preflight.infiniband and 0 <= limits["memlock"] < _MEMLOCK:
        yield Hit("host.memlock", host.name, f"memlock is {limits['memlock'] // 1024} KiB")
    if target.way == "here":
        return
    if 0 <= limits["nofile"] < _NOFILE:
        yield Hit("host.nofile", host.name, f"nofile is {limits['nofile']}")
    load, cores = host.system["load"], host.system["cores"]
    if cores < target.preflight.cpu_cores:
        yield Hit("host.cores", host.name, f"{cores} of {target.preflight.cpu_cores}")
    if load > _BUSY * cores:
        yield Hit("host.load", host.name, f"load {load:.1f} on {cores} cores")


def clock(host: Host, target: Target) -> Iterator[Hit]:
    skew = host.clock_s
    if skew is not None and abs(skew) > target.preflight.clock_seconds:
        yield Hit("host.clock", host.name, f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}")


def kernel(host: Host, target: Target) -> Iterator[Hit]:
    """What the kernel reported in the last day."""
    since = host.system.get("uptime", 0.0) - _DAY_S
    recent = [each for each in host.events or () if each.seconds is None or each.seconds >= since]
    if killed := [each.text for each in recent if each.kind == "out_of_memory"]:
        yield Hit("host.out_of_memory", host.name, f"{killed[-1]} ({len(killed)} in all)")
    if disk := [each.text for each in recent if each.kind == "disk"]:
        yield Hit("host.disk_fault", host.name, disk[-1])
    if not target.gpus:
        return
    for each in {event.number: event for event in recent if event.kind == "xid"}.values():
        if each.number in HARDWARE_XIDS:
            yield Hit("gpu.xid", host.name, f"Xid {each.number}, {HARDWARE_XIDS[each.number]}; {each.text}")


def huge_pages(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    found = {host.name: host.system["huge_pages"] for host in hosts if host.system}
    usual = most_common(found) if found else ""
    for host, pages in found.items():
        if pages != usual:
            yield Hit("host.huge_pages", host, f"{pages}; {usual} on most hosts")


ACROSS = (huge_pages,)
PER_HOST = (answers, room, clock, kernel)
