"""The kernel's messages that name a fault: NVIDIA's Xids, memory that ran out, disks that fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STAMP = re.compile(r"^\[\s*(\d+\.\d+)\]")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
_FALLEN = re.compile(r"NVRM: .*fallen off the bus")
_KILLED = re.compile(r"Out of memory: Killed process \d+ \(([^)]*)\)")
_DISK = re.compile(r"(I/O error, dev [^\s,]+|Remounting filesystem read-only)")


@dataclass(frozen=True)
class Event:
    """One message."""

    kind: str
    """xid | out_of_memory | disk"""
    seconds: float | None
    """Since boot; None where the message has another stamp."""
    number: int
    """Of an Xid; 0 otherwise."""
    text: str


def events(text: str) -> Iterator[Event]:
    for line in text.splitlines():
        stamp = _STAMP.match(line)
        seconds = float(stamp[1]) if stamp else None
        if xid := _XID.search(line):
            yield Event("xid", seconds, int(xid[2]), f"GPU {xid[1]}: {xid[3].strip()}")
        elif _FALLEN.search(line):
            # Newer drivers write it without an Xid, over several lines of which the first alone has a stamp.
            yield Event("xid", seconds, 79, "a GPU is lost")
        elif killed := _KILLED.search(line):
            yield Event("out_of_memory", seconds, 0, killed[1])
        elif disk := _DISK.search(line):
            yield Event("disk", seconds, 0, disk[1])
