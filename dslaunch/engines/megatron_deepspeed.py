"""Megatron-DeepSpeed's pretrain script: tensor and pipeline parallelism, ZeRO underneath."""

from __future__ import annotations

import dataclasses

from dslaunch.engines import deepspeed

ENGINE = dataclasses.replace(
    deepspeed.ENGINE,
    name="megatron_deepspeed",
    program="Megatron-DeepSpeed's pretrain_gpt.py (engine.path)",
    single_decoder=True,
    degrees=frozenset({"tp", "pp"}),
    zero_with_pipeline=frozenset({0, 1}),
    offload=frozenset({"none", "cpu"}),
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    schedules=frozenset({"1f1b"}),
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: ZeRO-2 and ZeRO-3 are incompatible with pipelines",
)
