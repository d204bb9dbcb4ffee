"""What the ledgers are computed from: one component in its layout under one engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from dslaunch.engines.base import WIDTH, Engine, StateBytes, StateCase
from dslaunch.engines.layout import Layout
from dslaunch.engines.native import layers_of
from dslaunch.hardware.corrections import Correction
from dslaunch.hardware.efficiency import Tables
from dslaunch.hardware.software import OF_ENGINE, Flagged, Software, flagged
from dslaunch.model.params import Counts, counts, trained_layers
from dslaunch.model.passes import Pass
from dslaunch.model.tokens import Reads, own_tokens, reads
from dslaunch.plan.schedules import FOLDED, SPLIT, held
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Component


@dataclass(frozen=True)
class Case:
    """One component, its layout, and the settings that its bytes and seconds depend on."""

    config: RunConfig
    engine: Engine
    name: str
    layout: Layout
    grad_accum_dtype: str
    software: Software
    held_ahead: int = 0
    """Micro-batches that a component before a trunk on other ranks holds; 0: all of a step."""

    def correction(self, tables: Tables) -> Correction:
        """What the site's own runs correct of the ledgers."""
        return tables.corrected(self.config.cluster.gpu.name, self.software.family, self.engine.deepspeed)

    @cached_property
    def component(self) -> Component:
        return self.config.model.components[self.name]

    @cached_property
    def is_trunk(self) -> bool:
        return self.name == self.config.model.trunk

    @property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return WIDTH[self.config.training.precision]

    @cached_property
    def samples(self) -> int:
        """Samples of a micro-batch times the component's passes for each."""
        return self.layout.micro_batch * self.component.passes

    @cached_property
    def tokens(self) -> int:
        """Tokens of one pass on one context-parallel rank."""
        tokens = own_tokens(self.config.model, self.name, self.config.training.seq_len)
        return tokens // self.layout.cp if self.is_trunk else tokens

    @cached_property
    def reads(self) -> Reads:
        """Tokens of other components that one pass attends to."""
        return reads(self.config.model, self.name)

    @cached_property
    def run(self) -> Pass:
        """One pass on one rank, as the bytes that it keeps depend on it."""
        layout = self.layout
        return Pass(
            self.tokens, layout.tp, self.sequence_parallel, layout.recompute, self.width, self.reads, layout.ep,
            layout.etp, self.samples, layout.cp, self.software,
        )  # fmt: skip

    @cached_property
    def sequence_parallel(self) -> bool:
        return self.engine.sequence_parallel and self.config.training.sequence_parallel and self.layout.tp > 1

    @property
    def encode_all(self) -> bool:
        """Whether all micro-batches run forward before the trunk starts: beside a trunk, one engine each."""
        before = not self.is_trunk and self.config.model.trunk not in _upstream(self.config, self.name)
        return self.engine.per_component and before

    @property
    def states(self) -> StateBytes:
        return self._states(self.layout.shard)

    @property
    def expert_states(self) -> StateBytes:
        """Of routed experts, each of which stands on ep x etp of a stage's ranks once."""
        return self._states(self.layout.expert_shard)

    def _states(self, shard: int) -> StateBytes:
        layout = self.layout
        return self.engine.states(
            StateCase(
                self.config.training.precision,
                self.grad_accum_dtype,
                layout.zero,
                shard,
                layout.offload,
                self.config.strategy.ddp.gradient_as_bucket_view,
                self.software.half_states,
                self.software.half_moments,
                self.software.optimizer,
                self.software.foreach_step,
                self.software.offloaded_states,
            )
        )

    @property
    def frozen(self) -> bool:
        return self.component.train == "nothing"

    @property
    def passes_gradient(self) -> bool:
        """Whether something before this component trains, so that gradients run through it."""
        model = self.config.model
        return any(model.components[name].train != "nothing" for name in _upstream(self.config, self.name))

    @property
    def tail_stage(self) -> int:
        """The stage with what stands behind the last layer."""
        return 0 if self.config.training.schedule in FOLDED else self.layout.pp - 1

    def first_layer(self, stage: int) -> int:
        return self._first_layers[stage]

    @cached_property
    def _first_layers(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.layout.layers_per_stage, initial=0))

    def counts(self, stage: int) -> Counts:
        """Parameters on a rank of the stage, by how they are kept."""
        layout, first = self.layout, self.first_layer(stage)
        layers = layout.layers_per_stage[stage]
        tail = stage == self.tail_stage
        return counts(self.component, layout.tp, first, layers, layout.ep, layout.etp, tail=tail)

    def params_on_rank(self, stage: int) -> int:
        """Parameters that a rank of the stage computes with."""
        return self.counts(stage).total

    @cached_property
    def lowest_layer(self) -> int:
        """The first layer that gradients reach: all where adapters, the stem or something before trains."""
        component = self.component
        if component.train != "layers" or self.passes_gradient or "stem" in component.train_ends:
            return 0
        return min(trained_layers(component), default=sum(self.layout.layers_per_stage))

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations the stage holds at its fullest moment; m are those of a macro-batch.

        1F1B: min(m, p - i). GPipe, and encode-all: m, or what is ahead of a trunk on other ranks. Interleaved:
        the first stage holds p (1 + (p-1)/(pv)), Megatron's warm-up of 2(p-i-1) + (v-1)p chunks and one
        (arXiv:2104.04473 section 2.2). Those that split the backward pass: `dslaunch.plan.schedules`.
        """
        m = self.layout.num_microbatches // self.config.training.macro_batches
        p, v, schedule = self.layout.pp, self.layout.vpp, self.config.training.schedule
        if self.encode_all:
            return self.held_ahead or m
        if p == 1 or self.software.naive_split:
            return 1
        if schedule == "gpipe":
            return m
        if v > 1 and schedule not in SPLIT:
            return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
        return held(schedule or "1f1b", p, stage, m)


def cases(
    config: RunConfig,
    engine: Engine,
    layouts: Mapping[str, Layout],
    grad_accum_dtype: str,
    software: Software | None = None,
) -> dict[str, Case]:
    """A case for each component.

    Args:
        software: what runs; the engine's usual layers where it is None.
    """
    whose = layers_of(engine.name, config.script or config.module)
    composed = whose == "native" and config.cluster.gpu.accelerator == "cpu"
    said = flagged(engine.name, config.engine.extra)
    runs = software or _usual(whose, config.strategy.dispatcher, composed, said, config.engine.accelerate)
    ahead = _held_ahead(config, layouts) if engine.name == "native" else {}
    return {
        name: Case(config, engine, name, layout, grad_accum_dtype, runs, ahead.get(name, 0))
        for name, layout in layouts.items()
    }


def _held_ahead(config: RunConfig, layouts: Mapping[str, Layout]) -> dict[str, int]:
    """Micro-batches that components before the trunk hold where it stands apart; empty where it does not.

    They run 1F1B over rounds of common micro-batches, ahead of the trunk by those that fill its pipeline
    (dslaunch/runtime/tasks.py, in_lockstep).
    """
    trunk, schedule = layouts.get(config.model.trunk), config.training.schedule
    front = {n: own for n, own in layouts.items() if config.model.trunk not in {n, *_upstream(config, n)}}
    if trunk is None or not front or schedule == "gpipe" or any(_meet(own, trunk) for own in front.values()):
        return {}
    rounds = math.gcd(trunk.num_microbatches, *(own.num_microbatches for own in front.values()))
    fill = trunk.pp * (2 if trunk.vpp > 1 else 1)
    ahead = math.ceil(fill / (trunk.num_microbatches // rounds))
    return {n: min(rounds, ahead + 1) * own.num_microbatches // rounds for n, own in front.items()}


def _meet(one: Layout, other: Layout) -> bool:
    """Whether they have a rank in common."""
    first, last = max(one.rank_offset, other.rank_offset), min(_end(one), _end(other))
    return first < last


def _end(layout: Layout) -> int:
    return layout.rank_offset + layout.ranks


@lru_cache(maxsize=32)
def _usual(
    engine: str, dispatcher: Literal["alltoall", "deepep"], composed: bool, said: Flagged, accelerated: bool
) -> Software:
    """What runs under an engine where nobody says otherwise; one object, so that look-ups need not compare.

    Accelerate's `accumulate`, and Trainer, have gradients reduced behind a step's last micro-batch
    (accelerate/accelerator.py, no_sync, 1.x; `sync_each_batch` is off).
    """
    usual = replace(OF_ENGINE[engine], dispatcher=dispatcher, composed_norms=composed, **vars(said))
    return replace(usual, whole_gradients=accelerated)


def _upstream(config: RunConfig, name: str) -> set[str]:
    """Components whose output reaches `name`."""
    direct = {edge.source for edge in config.model.edges if edge.to == name}
    return direct.union(*(_upstream(config, source) for source in direct))
