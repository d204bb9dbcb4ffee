"""Which version of a framework `engine.version` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dslaunch.engines.deepspeed_keys import release

if TYPE_CHECKING:
    # Rules read versions and are loaded without the schema that engines stand on.
    from dslaunch.engines.base import Engine

NO_MEM_STATUS = "0.17.5"
"""The first DeepSpeed without PipelineEngine.mem_status (deepspeedai/DeepSpeed 1a8ad24f0, #7431), which ZB-H1 of
Megatron-DeepSpeed calls (megatron/core/pipeline_parallel/deepspeed_zbh1_engine.py of 4efb479)."""


def named(wanted: str, versions: Sequence[str]) -> str:
    """`wanted` where it is one of `versions`, else the newest of its series: 0.18 names the newest 0.18.x.

    What names none of them comes back as it is, for the caller to refuse.
    """
    series = [version for version in versions if version.startswith(f"{wanted}.")]
    return wanted if wanted in versions or not series else max(series, key=release)


def orders(engine: Engine, wanted: str) -> frozenset[str]:
    """Orders of micro-batches that an engine executes in the version that `wanted` names, or its usual one.

    All of them where no version is named so, which is refused elsewhere.
    """
    version = named(wanted, engine.versions) if wanted else engine.versions[0]
    if version not in engine.versions:
        return engine.schedules
    gone = {order for order, first in engine.ended.items() if release(version) >= release(first)}
    return engine.schedules - gone


def executing(engine: Engine, order: str) -> str:
    """The newest version of an engine that executes an order of micro-batches."""
    return max((version for version in engine.versions if order in orders(engine, version)), key=release)
