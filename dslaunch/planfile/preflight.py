"""What preflight holds the hosts against: what preflight.json holds."""

from __future__ import annotations

from dataclasses import dataclass, field

PREFLIGHT_SCHEMA = "dslaunch.preflight/1"


@dataclass(frozen=True)
class PreflightPlan:
    """Written as preflight.json beside plan.json, which says the rest (ranks, program, port, folders)."""

    enabled: bool
    """Before every launch."""
    max_seconds: float
    """Limit of all of it."""
    host_seconds: float
    """Limit of one host's answers."""
    collective: bool
    """Whether a small collective is run where there are several ranks on other hosts."""
    bandwidth_fraction: float
    """Share of the promised bandwidth below which a link counts as slow."""
    clock_seconds: float
    """Difference of two clocks above which it is named."""
    cache_minutes: float
    """SLURM: how long a node's good answers are kept."""
    dcgm: bool
    """Whether DCGM's quick diagnosis is run where dcgmi is installed."""
    ignore: tuple[str, ...]
    """Checks that do not stop a launch."""
    gpu_memory_gib: float
    intra_gb_per_s: float
    """Promised between the GPUs of a node, GB/s one way per GPU."""
    nvlink: bool
    """Whether the GPUs of a node are joined by NVLink."""
    network_gb_per_s: float
    """Promised between nodes, GB/s one way per GPU; 0: there is one node."""
    infiniband: bool
    cpu_cores: int
    """Of a node."""
    checkpoint_bytes: int
    """One checkpoint of the whole model."""
    checkpoints: int
    """How many will be written."""
    container: bool
    """Ranks run in a container: its software is not the hosts'."""
    env: dict[str, str]
    """Environment of every rank."""
    env_defaults: dict[str, str] = field(default_factory=dict)
    """The same, where a host does not have the variable itself."""
    schema: str = PREFLIGHT_SCHEMA
