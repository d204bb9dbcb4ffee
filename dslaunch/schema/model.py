"""A model is a graph: components are its nodes, and an edge says which tokens go from one to the next."""

from __future__ import annotations

import graphlib
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dslaunch.errors import listed, nearest
from dslaunch.schema.base import Name, NonNegative, Part, Positive
from dslaunch.schema.components import Component, Decoder, Mlp, Other, Transformer, ViT

_WITH_LAYERS = Decoder | Transformer | ViT
__all__ = ["Component", "Decoder", "Edge", "Mlp", "Model", "Other", "Transformer", "ViT"]


class Edge(Part):
    """Tokens that go from one component to another."""

    source: Name = Field(alias="from")
    """The component whose output it is."""
    to: Name
    """The component whose input it becomes."""
    tokens: Positive
    """Tokens per sample over this edge, all passes together."""
    join: Literal["sequence", "channel", "add", "cross_attention", "shared_attention"]
    """How it enters: more tokens in the sequence, more channels of the same tokens, added to them, read by
    cross-attention, or one attention layer by layer over both ends' tokens, which puts them on one mesh."""
    from_layer: int = -1
    """The layer whose output is taken; -1 is the last, -2 leaves the last block without gradient."""
    to_layers: Annotated[tuple[NonNegative, ...], Field(strict=False)] = ()
    """The layers that it enters, where it is not the input (DeepStack), or not all that attend."""


class Model(Part):
    """Components and edges."""

    name: Name
    """As the file is called."""
    source: str = ""
    """Where the shapes were published."""
    weights: str = ""
    """Folder or file of the weights to start from; empty starts from random weights."""
    components: dict[Name, Component]
    """Each with the keys of its `arch`."""
    edges: Annotated[tuple[Edge, ...], Field(strict=False)] = ()
    """What goes from one component to the next."""

    @model_validator(mode="after")
    def _edges_join_components(self) -> Model:
        if not self.components:
            raise ValueError("components is empty: a model has at least one")
        if not any(isinstance(c, _WITH_LAYERS) for c in self.components.values()):
            raise ValueError("no component has layers (decoder, transformer, vit): the trunk is missing")
        for edge in self.edges:
            for end in (edge.source, edge.to):
                if end not in self.components:
                    raise ValueError(
                        f"edge {edge.source} -> {edge.to}: no component '{end}'; "
                        f"there are {listed(self.components)}.{nearest(end, self.components)}"
                    )
        alone = set(self.components) - {end for edge in self.edges for end in (edge.source, edge.to)}
        if len(self.components) > 1 and alone:
            raise ValueError(f"no edge joins {listed(sorted(alone))} to the rest of the model")
        try:
            graphlib.TopologicalSorter(_sources(self.edges)).prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"edges form a circle: {' <- '.join(error.args[1])}; remove one") from error
        for edge in self.edges:
            _check_join(edge, self.components)
        return self

    @cached_property
    def trunk(self) -> str:
        """The component that the sequence runs through: the largest decoder, else the last one with layers."""
        decoders = [n for n, c in self.components.items() if isinstance(c, Decoder)]
        layered = {n for n, c in self.components.items() if isinstance(c, _WITH_LAYERS)}
        last = [n for n in self.components if n in layered and not layered & _downstream(n, self.edges)]
        return max(decoders or last, key=lambda n: _size(self.components[n]))

    def fused(self, name: str) -> set[str]:
        """Components that share attention with `name`, itself included: they need one layout."""
        found, more = {name}, {name}
        while more:
            ends = [{e.source, e.to} for e in self.edges if e.join == "shared_attention"]
            more = set().union(*(end for end in ends if end & found)) - found
            found |= more
        return found


def _sources(edges: tuple[Edge, ...]) -> dict[str, set[str]]:
    return {to: {edge.source for edge in edges if edge.to == to} for to in {edge.to for edge in edges}}


def _downstream(name: str, edges: tuple[Edge, ...]) -> set[str]:
    """Components that the output of `name` reaches."""
    direct = {edge.to for edge in edges if edge.source == name}
    return direct.union(*(_downstream(other, edges) for other in direct))


def _size(component: Component) -> int:
    return component.layers * component.hidden**2 if isinstance(component, _WITH_LAYERS) else 0


def _check_join(edge: Edge, components: dict[str, Component]) -> None:
    source, target, shown = components[edge.source], components[edge.to], f"edge {edge.source} -> {edge.to}"
    if edge.join == "cross_attention" and not (isinstance(target, Transformer) and target.cross):
        raise ValueError(f"{shown} joins by cross_attention, but {edge.to} has no `cross: {{width: ...}}`")
    if edge.join != "shared_attention":
        return
    if not (isinstance(source, Decoder | Transformer) and isinstance(target, Decoder | Transformer)):
        raise ValueError(f"{shown} joins by shared_attention, which takes a decoder or transformer at both ends")
    shapes = [
        (c.layers, c.heads, c.kv_heads or c.heads, c.head_dim or c.hidden // c.heads) for c in (source, target)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{shown} joins by shared_attention: (layers, heads, kv_heads, head_dim) is {shapes[0]} and "
            f"{shapes[1]}, and must be equal"
        )
