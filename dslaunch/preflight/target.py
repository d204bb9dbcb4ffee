"""What preflight is asked about: the hosts, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dslaunch.planfile import Plan, PreflightPlan

Way = Literal["here", "ssh", "srun"]


@dataclass(frozen=True)
class Target:
    """One launch, before it."""

    plan: Plan
    preflight: PreflightPlan
    way: Way
    """How the hosts are reached: here is this machine alone, srun the allocation that this process is in."""
    hosts: tuple[str, ...]
    """In rank order; the first is the master."""
    python: str
    """The training's interpreter, as each host is asked for it."""
    script: str
    """Absolute; empty where a module runs."""
    checkpoint_dir: str
    """Absolute."""
    port: int
    """Of the rendezvous; 0 where it is chosen at launch."""
    host_memory_gib: float = 0.0
    """Predicted need of one node; 0: unknown."""

    @property
    def gpus(self) -> bool:
        return self.plan.cluster.accelerator != "cpu"

    @property
    def container(self) -> bool:
        """Ranks run in a container, whose software the hosts cannot tell."""
        return self.preflight.container

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs beside the interpreter that ranks are started with."""
        return ("nsys",) if self.plan.profile.kind == "nsys" else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, without the users that ssh logs in as."""
        return tuple(host.rpartition("@")[2] for host in self.hosts)

    def gpus_on(self, name: str) -> int:
        """GPUs that ranks use on a host."""
        slots = self.plan.cluster.slots
        return slots[self.names.index(name.rpartition("@")[2])] if slots else self.plan.cluster.gpus_per_node

    @property
    def several(self) -> bool:
        return len(self.hosts) > 1


@dataclass(frozen=True)
class Hit:
    """One thing found."""

    check: str
    """Its id in checks.yaml."""
    host: str
    found: str
