"""The profiler around chosen ranks, as a plan has it."""

from __future__ import annotations

from dslaunch.errors import ConfigError
from dslaunch.planfile.plan import ProfilePlan
from dslaunch.schema.config import RunConfig


def profile_plan(config: RunConfig) -> ProfilePlan:
    """Raises ConfigError where a rank is not there, or where nsys would have nothing to record."""
    wanted, world = config.profile, config.cluster.world_size
    if wanted.kind == "none":
        return ProfilePlan()
    if wanted.kind == "nsys" and config.cluster.gpu.accelerator != "cuda":
        raise ConfigError(
            f"profile=nsys records CUDA, and the cluster's GPU is {config.cluster.gpu.name}. Use profile=torch"
        )
    if absent := [rank for rank in wanted.ranks if rank >= world]:
        raise ConfigError(f"profile.ranks names {absent[0]}; the plan's ranks are 0 to {world - 1}")
    return ProfilePlan(
        wanted.kind, tuple(sorted(set(wanted.ranks))), wanted.first_step, wanted.steps, wanted.nsys_options
    )
