"""What `ethtool INTERFACE` prints (ethtool's netlink/settings.c)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPEED = re.compile(r"^\s*Speed: (\d+)Mb/s", re.MULTILINE)
_DUPLEX = re.compile(r"^\s*Duplex: (\w+)", re.MULTILINE)
_LINK = re.compile(r"^\s*Link detected: (yes|no)", re.MULTILINE)


@dataclass(frozen=True)
class Link:
    up: bool
    gbit_per_s: float
    """0.0 where it is unknown, as of a link that is down."""
    half_duplex: bool


def link(text: str) -> Link | None:
    """None where the interface says nothing of a link."""
    detected = _LINK.search(text)
    if not detected:
        return None
    speed, duplex = _SPEED.search(text), _DUPLEX.search(text)
    return Link(detected[1] == "yes", int(speed[1]) / 1000 if speed else 0.0, bool(duplex and duplex[1] == "Half"))
