"""What an engine can do, as data, and the refusals that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dslaunch.engines.layout import Layout
from dslaunch.errors import listed
from dslaunch.hardware.software import Optimizer
from dslaunch.schema.config import RunConfig

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one element by precision."""


@dataclass(frozen=True)
class StateCase:
    """What the bytes of a component's states depend on."""

    precision: str
    grad_accum_dtype: str
    zero: int
    shard: int
    """Ranks over which states are sharded."""
    offload: str
    gradient_views: bool = False
    """Gradients are views of communication buckets (DDP)."""
    half_states: bool = False
    """Weights, gradients and moments are all in 16 bits."""
    half_moments: bool = False
    """The optimizer's two moments are in 16 bits."""
    optimizer: Optimizer = "adamw"
    foreach_step: bool = False
    """The optimizer's step has a temporary tensor for each parameter at once."""
    offloaded: float = 0.0
    """Share of the optimizer's states that is stepped in host memory."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trainable parameter that a rank computes with (after TP and PP)."""

    weights: float
    gradients: float
    optimizer: float
    host: float = 0.0
    """In host memory."""
    step: float = 0.0
    """On the GPU during the optimizer step only."""
    nvme: float = 0.0
    """In files on the node's NVMe."""


@dataclass(frozen=True)
class Engine:
    """One engine's capabilities and the traits of its ledger."""

    name: str
    versions: tuple[str, ...]
    """Framework versions that files are rendered for: the default, then the others, newest first."""
    program: str
    """What runs, in words."""
    shardings: frozenset[str]
    deepspeed: bool
    """Whether DeepSpeed shards and reduces: its JSON is rendered, and its buckets take memory."""
    per_component: bool
    """Whether each component may have a layout of its own."""
    single_decoder: bool
    """Whether the model must be one decoder, nothing else."""
    degrees: frozenset[str]
    """Those of tp, pp, vpp, cp, ep that may exceed 1; etp: experts may be cut otherwise than by tp."""
    zero: frozenset[int]
    zero_with_pipeline: frozenset[int]
    """ZeRO stages that go with pp > 1."""
    offload: frozenset[str]
    precisions: frozenset[str]
    schedules: frozenset[str]
    sequence_parallel: bool
    """Whether the norms' activations are sharded over tp."""
    even_stages: bool
    """Whether only equal splits and a shorter first or last stage can be expressed."""
    grad_accum: Callable[[str, bool], str]
    """(precision, whether micro-batches are accumulated) -> type that gradients are accumulated in."""
    grad_accum_choices: Callable[[str, int], frozenset[str]]
    """(precision, zero) -> types that the engine takes."""
    states: Callable[[StateCase], StateBytes]
    reduces_every_microbatch: frozenset[int]
    """ZeRO stages at which gradients are reduced on each micro-batch, not once a step."""
    overlaps_reduction: bool
    """Whether gradient reduction runs beside the backward pass where pp is 1."""
    source: str
    towers_apart: bool = False
    """Whether the components beside the trunk have one layout, on ranks of their own before the trunk's, and share
    out the samples of its micro-batches."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Of `schedules`, those that newer versions lack: the first one without."""
    own_entry: bool = False
    """Whether it runs nothing but an entry that the user writes for it: a search takes it where one is named."""
    limits: Callable[[RunConfig, Mapping[str, Layout]], list[str]] = lambda config, layouts: []
    """(configuration, layouts by component) -> what no other field says against them, a sentence each."""


def refusals(
    engine: Engine, layouts: Mapping[str, Layout], sharding: str, precision: str, schedule: str, decoders: int
) -> list[str]:
    """Why `engine` can't execute the layouts: one sentence a fault, naming the key; empty where it can.

    Args:
        layouts: by component.
        decoders: how many of the components are decoders.
    """
    found: list[str] = []
    if sharding not in engine.shardings:
        found.append(
            f"strategy.sharding is {sharding}; {engine.name} takes {listed(sorted(engine.shardings))}"
        )
    if precision not in engine.precisions:
        found.append(
            f"training.precision is {precision}; {engine.name} takes {listed(sorted(engine.precisions))}"
        )
    if engine.single_decoder and (len(layouts) != 1 or decoders != 1):
        names = listed(layouts)
        has = f"one component, {names}" if len(layouts) == 1 else f"{len(layouts)} components ({names})"
        found.append(f"the model has {has}; {engine.name} takes a single decoder")
    takes_pp = "pp" in engine.degrees
    if takes_pp and any(layout.pp > 1 for layout in layouts.values()) and schedule not in engine.schedules:
        found.append(
            f"training.schedule is {schedule}; {engine.name} takes {listed(sorted(engine.schedules))}"
        )
    for name, layout in layouts.items():
        found += _layout_refusals(engine, name, layout)
    if not engine.per_component and not found and len({_shape(layout) for layout in layouts.values()}) > 1:
        shown = "; ".join(f"{name} {layout.describe()}" for name, layout in layouts.items())
        found.append(f"{engine.name} takes one layout for the whole model, found {shown}")
    if not engine.per_component and not found and len({each.micro_batch for each in layouts.values()}) > 1:
        shown = ", ".join(f"{name} {layout.micro_batch}" for name, layout in layouts.items())
        found.append(
            f"strategy.COMPONENT.micro_batch differs ({shown}); {engine.name} runs the whole model on one "
            "micro-batch: set training.micro_batch alone"
        )
    return found


def _layout_refusals(engine: Engine, name: str, layout: Layout) -> list[str]:
    key = f"strategy.{name}"
    found = [
        f"{key}.{degree} is {getattr(layout, degree)}; {engine.name} takes {degree} 1"
        for degree in ("tp", "pp", "vpp", "cp", "ep")
        if getattr(layout, degree) > 1 and degree not in engine.degrees
    ]
    if layout.expert_tp and "etp" not in engine.degrees:
        found.append(
            f"{key}.etp is {layout.expert_tp}; {engine.name} cuts experts as the rest of the layer, by tp "
            f"{layout.tp}: leave it out"
        )
    stages = engine.zero_with_pipeline if layout.pp > 1 and "pp" in engine.degrees else engine.zero
    if layout.zero not in stages:
        beside = f" where pp is {layout.pp}" if stages is not engine.zero else ""
        why = f" ({engine.source})" if stages is not engine.zero else ""
        nearest = min(stages, key=lambda stage: abs(stage - layout.zero))
        found.append(
            f"{key}.zero is {layout.zero}; {engine.name} takes {listed(sorted(stages))}{beside}{why}; "
            f"nearest: {key}.zero={nearest}"
        )
    if layout.offload not in engine.offload:
        found.append(
            f"{key}.offload is {layout.offload}; {engine.name} takes {listed(sorted(engine.offload))}"
        )
    if layout.offload == "cpu" and layout.zero == 0:
        found.append(f"{key}.offload is cpu, but zero is 0: offload needs ZeRO 1, 2 or 3")
    if layout.offload == "cpu_params" and layout.zero != 3:
        found.append(
            f"{key}.offload is cpu_params, but zero is {layout.zero}: parameters move at ZeRO-3 only"
        )
    if engine.even_stages and len(set(layout.layers_per_stage[1:-1])) > 1:
        found.append(
            f"{key}.layers_per_stage is {list(layout.layers_per_stage)}; {engine.name} can make the first and "
            "the last stage differ, no others"
        )
    return found


def _shape(layout: Layout) -> tuple[object, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.dp, layout.zero, layout.offload)
