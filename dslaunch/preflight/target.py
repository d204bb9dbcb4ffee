"""What preflight is asked about: the hosts, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
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
    launch_hosts: tuple[str, ...] = ()
    """All hosts of the launch, where `hosts` are some of them."""

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
        if not slots:
            return self.plan.cluster.gpus_per_node
        names = [host.rpartition("@")[2] for host in self.launch_hosts or self.hosts]
        return slots[names.index(name.rpartition("@")[2])]

    @property
    def components(self) -> tuple[tuple[str, ...], ...]:
        """Those of `hosts` that stand in each component of a heterogeneous SLURM job; one in any other."""
        sizes = self.plan.cluster.kinds
        if not sizes or self.way != "srun":
            return (self.hosts,)
        ends = list(accumulate(sizes))
        within = [self.launch_hosts[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return tuple(tuple(host for host in self.hosts if host in part) for part in within)

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
