"""What `ibstat` prints: adapters and their ports (linux-rdma/rdma-core infiniband-diags/ibstat.c)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADAPTER = re.compile(r"CA '([^']+)'")
_PORT = re.compile(r"\s*Port (\d+):\s*$")
_FIELD = re.compile(r"\s*(State|Physical state|Rate|Link layer): ?(.*)$")


@dataclass(frozen=True)
class Port:
    adapter: str
    number: int
    state: str
    """Active, Down, Initializing: the last waits for a subnet manager."""
    physical: str
    """LinkUp, Polling, Disabled."""
    gbit_per_s: float
    layer: str
    """InfiniBand or Ethernet."""

    @property
    def up(self) -> bool:
        return self.state == "Active" and self.physical == "LinkUp"


def ports(text: str) -> tuple[Port, ...]:
    """Every port, in the order printed."""
    found: list[tuple[str, int, dict[str, str]]] = []
    adapter = ""
    for line in text.splitlines():
        if head := _ADAPTER.match(line.strip()):
            adapter = head[1]
        elif port := _PORT.match(line):
            found.append((adapter, int(port[1]), {}))
        elif (field := _FIELD.match(line)) and found:
            found[-1][2][field[1]] = field[2].strip()
    return tuple(
        Port(
            name,
            number,
            said.get("State", ""),
            said.get("Physical state", ""),
            _rate(said.get("Rate", "")),
            said.get("Link layer", ""),
        )
        for name, number, said in found
    )


def _rate(text: str) -> float:
    number = text.split()[0] if text else ""
    return float(number) if re.fullmatch(r"[\d.]+", number) else 0.0
