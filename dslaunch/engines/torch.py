"""PyTorch alone: DistributedDataParallel, or fully_shard (FSDP2, HSDP), with a script of the user's."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.base import Engine, StateBytes, StateCase
from dslaunch.engines.layout import Layout
from dslaunch.schema.config import RunConfig
from dslaunch.schema.torch import Ddp

_RUNTIME = "dslaunch.runtime"


def states(case: StateCase) -> StateBytes:
    """fp32 weights, gradients and Adam's moments (16), sharded by FSDP2; the bf16 copies are transient.

    DDP copies gradients into its buckets unless they are views of them (`gradient_as_bucket_view`): 4 bytes
    more. Source: torch/nn/parallel/distributed.py and torch/distributed/fsdp/_fully_shard, 2.13.
    """
    n = case.shard if case.zero == 3 else 1
    buckets = 0.0 if case.zero == 3 or case.gradient_views else 4.0
    half_copy = 0.0 if case.precision == "fp32" or case.zero == 3 else 2.0
    return StateBytes(4.0 / n + half_copy, 4.0 / n + buckets, 8.0 / n)


def shard_size(config: RunConfig) -> int | None:
    """Ranks over which HSDP cuts the states; None where all replicas share them."""
    if config.strategy.sharding != "hsdp":
        return None
    return config.strategy.shard or config.cluster.slots


def only_torch(config: RunConfig, engine: str) -> list[str]:
    """What `engine` would silently leave out: a sentence each."""
    strategy = config.strategy
    found = []
    if strategy.ddp != Ddp() and (engine != "torch" or strategy.sharding != "ddp"):
        found.append(f"strategy.ddp is for sharding ddp of engine torch; this is {strategy.sharding} of {engine}")
    if strategy.shard and strategy.sharding != "hsdp":
        found.append(
            f"strategy.shard is {strategy.shard}, which strategy.sharding=hsdp reads; it is {strategy.sharding}"
        )
    return found


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """HSDP's mesh, and what dslaunch.runtime executes of all this."""
    size = shard_size(config)
    faults = [
        f"strategy.shard is {size}: dp {layout.dp} ({name}) / {size} = {layout.dp / size:.4g} is not whole"
        for name, layout in layouts.items()
        if size and layout.dp % size
    ]
    if config.module == _RUNTIME and (size or config.strategy.ddp != Ddp()):
        key = "strategy.sharding=hsdp" if size else "strategy.ddp"
        faults.append(f"{key}: dslaunch.runtime does not execute it; name a script of yours, script=PATH")
    return faults


ENGINE = Engine(
    name="torch",
    versions=("2.13",),
    program="the user's script under torchrun",
    shardings=frozenset({"ddp", "fsdp2", "hsdp"}),
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
    limits=limits,
)
