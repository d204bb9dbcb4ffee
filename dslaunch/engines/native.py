"""dslaunch.runtime: one DeepSpeed engine per component, each on a mesh of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dslaunch.engines import deepspeed
from dslaunch.engines.layout import Layout
from dslaunch.schema.config import RunConfig


def limits(_config: RunConfig, _layouts: Mapping[str, Layout]) -> list[str]:
    """Nothing beyond its fields."""
    return []


ENGINE = dataclasses.replace(
    deepspeed.ENGINE,
    name="native",
    program="dslaunch.runtime",
    per_component=True,
    degrees=frozenset({"tp", "pp"}),
    offload=frozenset({"none", "cpu"}),
    precisions=frozenset({"bf16", "fp32"}),
    schedules=frozenset({"1f1b", "gpipe"}),
    overlaps_reduction=True,
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: gradients must stay whole while micro-batches are in flight",
    limits=limits,
)
