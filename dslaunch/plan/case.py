"""What the ledgers are computed from: one component in its layout under one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dslaunch.engines.base import WIDTH, Engine, StateBytes, StateCase
from dslaunch.engines.layout import Layout
from dslaunch.model.params import params_on_rank
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Component, Mlp, ViT


@dataclass(frozen=True)
class Case:
    """One component, its layout, and the settings that its bytes and seconds depend on."""

    config: RunConfig
    engine: Engine
    name: str
    layout: Layout
    grad_accum_dtype: str

    @property
    def component(self) -> Component:
        return self.config.model.components[self.name]

    @property
    def is_trunk(self) -> bool:
        return self.name == self.config.model.trunk

    @property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return WIDTH[self.config.training.precision]

    @property
    def samples(self) -> int:
        """Samples of a micro-batch times the component's passes for each."""
        return self.layout.micro_batch * self.component.passes

    @property
    def tokens(self) -> int:
        """Tokens of one pass on one context-parallel rank."""
        component = self.component
        if isinstance(component, ViT):
            return component.tokens
        if isinstance(component, Mlp):
            return max(1, _incoming_tokens(self.config, self.name) // component.passes)
        return self.config.training.seq_len // self.layout.cp

    @property
    def sequence_parallel(self) -> bool:
        return self.engine.sequence_parallel and self.config.training.sequence_parallel and self.layout.tp > 1

    @property
    def encode_all(self) -> bool:
        """Whether all micro-batches run forward before the trunk starts: beside a trunk, one engine each."""
        return self.engine.per_component and not self.is_trunk

    @property
    def states(self) -> StateBytes:
        layout = self.layout
        return self.engine.states(
            StateCase(
                self.config.training.precision,
                self.grad_accum_dtype,
                layout.zero,
                layout.shard,
                layout.offload,
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

    def first_layer(self, stage: int) -> int:
        return sum(self.layout.layers_per_stage[:stage])

    def params_on_rank(self, stage: int) -> int:
        """Parameters that a rank of the stage computes with."""
        layers = self.layout.layers_per_stage[stage]
        return params_on_rank(self.component, self.layout.tp, self.first_layer(stage), layers)

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations the stage holds at its fullest moment.

        1F1B: min(m, p - i). GPipe, and encode-all: m. Interleaved: the first stage holds p (1 + (p-1)/(pv)),
        Megatron's warm-up of 2(p-i-1) + (v-1)p chunks and one (arXiv:2104.04473 section 2.2).
        """
        m, p, v = self.layout.num_microbatches, self.layout.pp, self.layout.vpp
        schedule = self.config.training.schedule
        if self.encode_all:
            return m
        if p == 1:
            return 1
        if schedule == "gpipe":
            return m
        if v > 1:
            return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
        return min(m, p - stage)


def cases(
    config: RunConfig, engine: Engine, layouts: Mapping[str, Layout], grad_accum_dtype: str
) -> dict[str, Case]:
    """A case for each component."""
    return {n: Case(config, engine, n, layout, grad_accum_dtype) for n, layout in layouts.items()}


def _incoming_tokens(config: RunConfig, name: str) -> int:
    """Tokens per sample that enter a component: channels of the same tokens count once."""
    edges = [edge for edge in config.model.edges if edge.to == name]
    sequence = sum(edge.tokens for edge in edges if edge.join == "sequence")
    return sequence or max((edge.tokens for edge in edges), default=config.training.seq_len)


def _upstream(config: RunConfig, name: str) -> set[str]:
    """Components whose output reaches `name`."""
    direct = {edge.source for edge in config.model.edges if edge.to == name}
    return direct.union(*(_upstream(config, source) for source in direct))
