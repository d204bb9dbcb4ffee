"""Megatron-LM's MIMO training: a vision grid and a language grid on ranks of their own.

Source: NVIDIA/Megatron-LM core_v0.19.0, examples/mimo/training/args.py (validate_hetero_grid_args) and
examples/mimo/pretrain_mimo.py, whose rules `limits` repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from dslaunch.engines import megatron
from dslaunch.engines.layout import Layout
from dslaunch.engines.megatron_limits import combinations
from dslaunch.errors import listed
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder, Mlp, ViT


@dataclasses.dataclass(frozen=True)
class Parts:
    """The names of the components, by what MIMO makes of them."""

    encoder: str
    projector: str
    """Empty where the tower's tokens enter the language model as they are."""
    llm: str


def parts(config: RunConfig) -> Parts | None:
    """One tower, at most one projector after it, one language model; None for another graph."""
    kinds: dict[type, list[str]] = {ViT: [], Mlp: [], Decoder: []}
    for name, component in config.model.components.items():
        if type(component) not in kinds:
            return None
        kinds[type(component)].append(name)
    if len(kinds[ViT]) != 1 or len(kinds[Mlp]) > 1 or len(kinds[Decoder]) != 1:
        return None
    return Parts(kinds[ViT][0], kinds[Mlp][0] if kinds[Mlp] else "", kinds[Decoder][0])


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What the two grids must be to one another."""
    found = parts(config)
    if found is None or not layouts.keys() >= config.model.components.keys():
        return [
            f"the model has {listed(config.model.components)}; megatron_mimo takes one vision tower, at most one "
            "projector and one decoder"
        ]
    encoder, llm = layouts[found.encoder], layouts[found.llm]
    return [
        *_spans(config, found, encoder, llm),
        *_projector(found, layouts),
        *_batches(found, encoder, llm),
        *_one_rate(config),
        *megatron.trains(config, ("all", "nothing")),
        *megatron.shared_out({found.llm: llm}),
        *combinations(config, {found.llm: llm}),
    ]


def _spans(config: RunConfig, found: Parts, encoder: Layout, llm: Layout) -> Iterator[str]:
    world, size = config.cluster.world_size, encoder.ranks
    if encoder.pp > 1:
        yield f"strategy.{found.encoder}.pp is {encoder.pp}; megatron_mimo takes pp 1 for the tower"
    if encoder.rank_offset:
        yield f"strategy.{found.encoder}.rank_offset is {encoder.rank_offset}; megatron_mimo wants 0"
    if llm.rank_offset != size or size + llm.ranks != world:
        yield (
            f"strategy.{found.llm} has ranks {llm.rank_offset} to {llm.rank_offset + llm.ranks - 1} and "
            f"strategy.{found.encoder} ranks 0 to {size - 1}: megatron_mimo wants each of {world} ranks once; "
            f"give strategy.{found.encoder}.dp, and strategy.{found.llm}.rank_offset={size}"
        )


def _projector(found: Parts, layouts: Mapping[str, Layout]) -> Iterator[str]:
    """The projector is part of the tower's module."""
    if not found.projector:
        return
    tower, projector = (layouts[name] for name in (found.encoder, found.projector))
    same = ("tp", "pp", "dp", "rank_offset", "micro_batch", "zero")
    different = [key for key in same if getattr(tower, key) != getattr(projector, key)]
    if different:
        yield (
            f"strategy.{found.projector} differs from strategy.{found.encoder} in {listed(different)}: "
            "megatron_mimo runs the projector on the tower's ranks. Give both the same"
        )


def _batches(found: Parts, encoder: Layout, llm: Layout) -> Iterator[str]:
    """Both grids work on the same micro-batch; the tower's replicas share out its samples."""
    samples = llm.micro_batch * llm.dp
    if samples % encoder.dp:
        yield (
            f"strategy.{found.encoder}.dp is {encoder.dp}: micro_batch {llm.micro_batch} x dp {llm.dp} "
            f"({found.llm}) = {samples} samples, and {samples} / {encoder.dp} = {samples / encoder.dp:.4g} is not "
            "whole"
        )
    elif encoder.micro_batch * encoder.dp != samples:
        yield (
            f"strategy.{found.encoder}.micro_batch is {encoder.micro_batch}: its replicas share out the "
            f"{samples} samples of one micro-batch; give {samples // encoder.dp}"
        )


def _one_rate(config: RunConfig) -> Iterator[str]:
    rates = {component.lr or config.training.optimizer.lr for component in config.model.components.values()}
    if len(rates) > 1:
        yield f"learning rates differ by component ({listed(sorted(rates))}); megatron_mimo has one for all"


ENGINE = dataclasses.replace(
    megatron.ENGINE,
    name="megatron_mimo",
    versions=("0.19.0",),
    program="your entry beside Megatron-LM's examples/mimo (script)",
    per_component=True,
    single_decoder=False,
    degrees=frozenset({"tp", "pp", "ep", "etp"}),
    zero=frozenset({1}),
    zero_with_pipeline=frozenset({1}),
    schedules=frozenset({"1f1b"}),
    even_stages=True,
    towers_apart=True,
    own_entry=True,
    source="examples/mimo/pretrain_mimo.py, core 0.19: it requires the distributed optimizer",
    limits=limits,
)
