"""PyTorch alone: DistributedDataParallel, or fully_shard (FSDP2), with a script of the user's."""

from __future__ import annotations

from dslaunch.engines.base import Engine, StateBytes, StateCase


def states(case: StateCase) -> StateBytes:
    """fp32 weights, gradients and Adam's moments (16), sharded by FSDP2; the bf16 copies are transient.

    DDP copies gradients into its buckets (`gradient_as_bucket_view=False`): 4 bytes more. Source:
    torch/nn/parallel/distributed.py and torch/distributed/fsdp/_fully_shard, 2.13.
    """
    n = case.shard if case.zero == 3 else 1
    buckets = 0.0 if case.zero == 3 else 4.0
    half_copy = 0.0 if case.precision == "fp32" or case.zero == 3 else 2.0
    return StateBytes(4.0 / n + half_copy, 4.0 / n + buckets, 8.0 / n)


ENGINE = Engine(
    name="torch",
    versions=("2.13",),
    program="the user's script under torchrun",
    shardings=frozenset({"ddp", "fsdp2"}),
    deepspeed=False,
    per_component=False,
    single_decoder=False,
    degrees=frozenset(),
    zero=frozenset({0, 3}),
    zero_with_pipeline=frozenset({0, 3}),
    offload=frozenset({"none"}),
    precisions=frozenset({"bf16", "fp32"}),
    schedules=frozenset({"1f1b"}),
    sequence_parallel=False,
    even_stages=False,
    grad_accum=lambda precision, accumulates: "fp32",
    grad_accum_choices=lambda precision, zero: frozenset({"fp32"}),
    states=states,
    reduces_every_microbatch=frozenset({3}),
    overlaps_reduction=True,
    source="torch/distributed/fsdp/_fully_shard, 2.13",
)
