"""Megatron-LM's pretrain script: tensor, pipeline, interleaved and context parallelism, distributed optimizer."""

from __future__ import annotations

from dslaunch.engines.base import Engine, StateBytes, StateCase


def states(case: StateCase) -> StateBytes:
    """18 bytes: 2 weights, 4 fp32 gradients, 12 states; the distributed optimizer (ZeRO-1) shards the 12.

    Source: docs/source/api-guide/dist_optimizer.md of NVIDIA/Megatron-LM, core 0.16.
    """
    n = case.shard if case.zero else 1
    if case.precision == "fp32":
        return StateBytes(4.0, 4.0, 8.0 / n)
    return StateBytes(2.0, 4.0 if case.grad_accum_dtype == "fp32" else 2.0, 12.0 / n)


ENGINE = Engine(
    name="megatron",
    versions=("0.16.0",),
    program="Megatron-LM's pretrain_gpt.py (engine.path)",
    shardings=frozenset({"zero"}),
    deepspeed=False,
    per_component=False,
    single_decoder=True,
    degrees=frozenset({"tp", "pp", "vpp", "cp"}),
    zero=frozenset({0, 1}),
    zero_with_pipeline=frozenset({0, 1}),
    offload=frozenset({"none"}),
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    schedules=frozenset({"1f1b", "interleaved"}),
    sequence_parallel=True,
    even_stages=True,
    grad_accum=lambda precision, accumulates: "fp32",
    grad_accum_choices=lambda precision, zero: frozenset({"fp32", precision}),
    states=states,
    reduces_every_microbatch=frozenset(),
    overlaps_reduction=True,
    source="megatron/training/arguments.py, core 0.16: the distributed optimizer shards as ZeRO-1 does",
)
