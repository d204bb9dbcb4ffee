"""PyTorch alone: DistributedDataParallel, or fully_shard (FSDP2, HSDP), with a script of the user's."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.base import Engine, StateBytes, StateCase
from dslaunch.engines.layout import Layout
from dslaunch.schema.config import RunConfig
from dslaunch.schema.torch import Ddp

_RUNTIME = "dslaunch.runtime"
STAGES = {"ddp": 0, "fsdp2": 3, "hsdp": 3}
"""The ZeRO stage that a sharding comes to."""
_EIGHT_BIT = 2 * (1 + 4 / 256)
"""Bytes of two moments in 8 bits, with an fp32 scale for each 256 values."""


def states(case: StateCase) -> StateBytes:
    """fp32 weights, gradients and Adam's moments (16), sharded by FSDP2; the bf16 copies are transient.

    DDP of several ranks copies gradients into its buckets unless they are views of them
    (`gradient_as_bucket_view`): as much again. A step of single operations for all parameters holds the
    root of the second moments. FSDP's SHARD_GRAD_OP (ZeRO-2) keeps the 16-bit weights
    whole. FSDP's CPU offload has all states on the host. Sources:
    torch/nn/parallel/distributed.py, torch/distributed/fsdp/_fully_shard and torch/optim/adamw.py
    (_multi_tensor_adam), 2.13; 8-bit moments: arXiv:2110.02861 section 2.
    """
    n = case.shard if case.zero >= 2 else 1
    width = 2.0 if case.half_states else 4.0
    buckets = 0.0 if case.zero >= 2 or case.gradient_views or case.shard == 1 else width
    half_copy = 0.0 if case.precision == "fp32" or case.zero == 3 or case.half_states else 2.0
    moments = {"adamw": 2 * width, "adamw8bit": _EIGHT_BIT, "paged_adamw8bit": 0.0}[case.optimizer]
    paged = _EIGHT_BIT if case.optimizer == "paged_adamw8bit" else 0.0
    step = width if case.foreach_step else 0.0
    if case.offload.endswith("_params"):
        return StateBytes(0.0, 0.0, 0.0, host=(2 * width + moments + paged) / n)
    return StateBytes(width / n + half_copy, width / n + buckets, moments / n, host=paged / n, step=step / n)


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
            f"strategy.shard is {strategy.shard}, and strategy.sharding {strategy.sharding}: hsdp alone reads it"
        )
    if config.engine.accelerate and engine != "torch":
        found.append(f"engine.accelerate is for engine torch; {engine} does not have it")
    return found


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """HSDP's mesh, and what dslaunch.runtime executes of all this."""
    size, sharding = shard_size(config), config.strategy.sharding
    faults = [
        f"strategy.{name}.zero is {layout.zero}; strategy.sharding={sharding} is stage {STAGES[sharding]}: leave "
        "zero out"
        for name, layout in layouts.items()
        if layout.zero != STAGES.get(sharding, layout.zero)
    ]
    faults += [
        f"strategy.shard is {size}: dp {layout.dp} ({name}) / {size} = {layout.dp / size:.4g} is not whole"
        for name, layout in layouts.items()
        if size and layout.dp % size
    ]
    if config.module == _RUNTIME and (size or config.strategy.ddp != Ddp()):
        key = "strategy.sharding=hsdp" if size else "strategy.ddp"
        faults.append(f"{key}: dslaunch.runtime does not execute it; name a script of yours, script=PATH")
    return faults + (_accelerate_faults(config) if config.engine.accelerate else [])


def _accelerate_faults(config: RunConfig) -> list[str]:
    """accelerate/state.py (AcceleratorState), 1.15: on CPU ranks FSDP is left out without a word."""
    if config.module == _RUNTIME:
        return [f"engine.accelerate is true, but {_RUNTIME} makes no Accelerator; set it to false"]
    if config.cluster.gpu.accelerator == "cpu" and config.strategy.sharding != "ddp":
        return [
            f"engine.accelerate is true, but on CPUs accelerate does no {config.strategy.sharding}: "
            "set strategy=ddp, or engine.accelerate=false"
        ]
    return []


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
