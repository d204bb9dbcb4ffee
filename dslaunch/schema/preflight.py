"""What is asked of the hosts before a launch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dslaunch.schema.base import NonNegativeFloat, Part, PositiveFloat, Texts


class Preflight(Part):
    """Checks of every host before a launch; `dslaunch explain CHECK` says what each is about."""

    enabled: bool = True
    """Before every launch; what fails stops it. `dslaunch preflight` runs in any case."""
    max_seconds: PositiveFloat = 180.0
    """Limit of all of it. What was not done by then is named as not checked."""
    host_seconds: PositiveFloat = 30.0
    """Limit of one host's answers."""
    collective: bool = True
    """Run a small all_reduce on all ranks, where there are hosts beside this one."""
    bandwidth_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the bandwidth that the cluster's file promises, below which a link counts as slow."""
    clock_seconds: PositiveFloat = 2.0
    """Difference between a host's clock and this machine's that is named."""
    cache_minutes: NonNegativeFloat = 30.0
    """SLURM: minutes for which a node that was in order is not asked again; 0 asks each time."""
    dcgm: bool = False
    """Run DCGM's quick diagnosis (dcgmi diag -r 1) where it is installed; it takes some seconds."""
    ignore: Texts = ()
    """Checks that are reported and do not stop a launch, such as gpu.throttled."""
