"""Megatron-LM's pretrain script: tensor, pipeline, interleaved, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.base import Engine, StateBytes, StateCase
from dslaunch.engines.layout import Layout
from dslaunch.engines.megatron_catalogue import megatron_versions
from dslaunch.engines.megatron_limits import DEFAULT, combinations
from dslaunch.errors import listed
from dslaunch.schema.config import RunConfig


def states(case: StateCase) -> StateBytes:
    """18 bytes: 2 weights, 4 fp32 gradients, 12 states; the distributed optimizer (ZeRO-1) shards the 12.

    Gradients in bf16 become fp32 for the step, shard by shard, where the optimizer does not read them as they
    are: its moments may be in 16 bits then too (the precision-aware optimizer). ZeRO-3, Megatron's FSDP,
    shards all. The share of states that --optimizer-offload-fraction puts on the host has master weights, their
    gradient and moments there, all in fp32 (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
    Source: docs/source/api-guide/dist_optimizer.md and
    megatron/core/optimizer/distrib_optimizer.py of NVIDIA/Megatron-LM, core 0.16.
    """
    n = case.shard if case.zero else 1
    whole = n if case.zero == 3 else 1
    if case.precision == "fp32":
        return StateBytes(4.0 / whole, 4.0 / whole, 8.0 / n)
    gradients = 4.0 if case.grad_accum_dtype == "fp32" else 2.0
    on_gpu, half_moments = 1 - case.offloaded, case.half_moments and not case.offloaded
    step = 4.0 * on_gpu / n if gradients == 2.0 and not half_moments else 0.0
    optimizer = (8.0 if half_moments else 12.0) * on_gpu / n
    return StateBytes(2.0 / whole, gradients / whole, optimizer, host=16.0 * case.offloaded / n, step=step)


def trains(config: RunConfig, allowed: tuple[str, ...]) -> list[str]:
    """Megatron's scripts have no flags for adapters and single layers."""
    return [
        f"model.components.{name}.train is {component.train}; Megatron's script has flags for {listed(allowed)}"
        for name, component in config.model.components.items()
        if component.train not in allowed
    ]


def shared_out(layouts: Mapping[str, Layout]) -> list[str]:
    """Experts are shared out among the ranks of a stage: each is on etp of them, and ep hold different ones.

    Source: megatron/core/parallel_state.py, initialize_model_parallel: world = etp * ep * expert dp * pp.
    """
    return [
        _not_shared_out(name, layout)
        for name, layout in layouts.items()
        if layout.shard * layout.tp % (layout.ep * layout.etp)
    ]


def _not_shared_out(name: str, layout: Layout) -> str:
    key, ranks, copies = f"strategy.{name}", layout.shard, layout.ep
    among = f"dp {layout.dp} x cp {layout.cp}"
    said = f"{key}.ep is {layout.ep}"
    if layout.expert_tp:
        ranks, copies, among = ranks * layout.tp, copies * layout.etp, f"tp {layout.tp} x {among}"
        said = f"{key}: ep {layout.ep} x etp {layout.etp} = {copies}"
    return (
        f"{said}: Megatron shares experts out among {among} = {ranks} ranks, and {ranks} / {copies} = "
        f"{ranks / copies:.4g} is not whole"
    )


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What no degree says: experts, what trains, and what its validation stops at."""
    return [*trains(config, ("all",)), *shared_out(layouts), *combinations(config, layouts)]


ENGINE = Engine(
    name="megatron",
    versions=(DEFAULT, *(version for version in reversed(megatron_versions()) if version != DEFAULT)),
    program="Megatron-LM's pretrain_gpt.py (engine.path)",
    shardings=frozenset({"zero"}),
    deepspeed=False,
    per_component=False,
    single_decoder=True,
    degrees=frozenset({"tp", "pp", "vpp", "cp", "ep", "etp"}),
    zero=frozenset({0, 1}),
    zero_with_pipeline=frozenset({0, 1}),
    offload=frozenset({"none"}),
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    schedules=frozenset({"1f1b", "interleaved"}),
    sequence_parallel=True,
    even_stages=False,
    grad_accum=lambda precision, accumulates: "fp32",
    grad_accum_choices=lambda precision, zero: frozenset({"fp32", precision}),
    states=states,
    reduces_every_microbatch=frozenset(),
    overlaps_reduction=True,
    source="megatron/training/arguments.py, core 0.16: the distributed optimizer shards as ZeRO-1 does",
    limits=limits,
)
