"""dslaunch.runtime: one DeepSpeed engine per component, each on a mesh of its own."""

from __future__ import annotations

import dataclasses

from dslaunch.engines import deepspeed

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
)
