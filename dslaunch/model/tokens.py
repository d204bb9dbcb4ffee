"""How many tokens a component runs over, and how many of other components its attention reads."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.schema.components import Decoder, Mlp, Other, ViT
from dslaunch.schema.model import Model


@dataclass(frozen=True)
class Reads:
    """Tokens of other components that one pass attends to."""

    cross: int = 0
    """Read by cross-attention."""
    shared: int = 0
    """Beside the component's own in each self-attention: another component's keys, layer by layer."""


def own_tokens(model: Model, name: str, seq_len: int) -> int:
    """Tokens of one pass of a component.

    A tower's follow from its image. The trunk's are the sequence. Others say how many, or take what their
    edges bring: the sum over `sequence` edges, or the most that `channel` and `add` edges bring, for each of
    their passes; joined neighbours and learnt queries are counted.
    """
    component = model.components[name]
    if isinstance(component, ViT | Other):
        return component.tokens
    if isinstance(component, Decoder):
        return seq_len if name == model.trunk else _incoming(model, name, seq_len) // component.passes
    if component.tokens is not None:
        return component.tokens
    if isinstance(component, Mlp):
        return max(1, _incoming(model, name, seq_len) // component.passes // component.merge)
    if name == model.trunk:
        return seq_len
    brought = _incoming(model, name, 0) // component.passes
    return max(1, brought + component.queries)


def reads(model: Model, name: str) -> Reads:
    """What one pass of `name` attends to besides its own tokens."""
    by_join = {
        join: sum(edge.tokens for edge in model.edges if edge.to == name and edge.join == join)
        for join in ("cross_attention", "shared_attention")
    }
    return Reads(by_join["cross_attention"], by_join["shared_attention"])


def _incoming(model: Model, name: str, otherwise: int) -> int:
    """Tokens per sample that enter a component as its input; `otherwise` where no edge brings any."""
    edges = [edge for edge in model.edges if edge.to == name and not edge.to_layers]
    sequence = sum(edge.tokens for edge in edges if edge.join == "sequence")
    return sequence or max((edge.tokens for edge in edges if edge.join in ("channel", "add")), default=otherwise)
