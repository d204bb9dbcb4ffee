"""How many tokens a component runs over, and how many of other components its attention reads."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.schema.components import Decoder, Mlp, Other, Transformer, ViT
from dslaunch.schema.model import Model


@dataclass(frozen=True)
class Reads:
    """Tokens of other components that one pass attends to."""

    cross: tuple[int, ...] = ()
    """Read by the cross-attention of each layer; empty: by none."""
    shared: int = 0
    """Beside the component's own in each self-attention: another component's keys, layer by layer."""

    def cross_at(self, layer: int) -> int:
        """What the cross-attention of one layer reads."""
        return self.cross[layer] if self.cross else 0


ALONE = Reads()
"""Nothing of other components."""


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
    component = model.components[name]
    incoming = [edge for edge in model.edges if edge.to == name]
    shared = sum(edge.tokens for edge in incoming if edge.join == "shared_attention")
    crossed = [edge for edge in incoming if edge.join == "cross_attention"]
    if not crossed or not isinstance(component, Transformer):
        return Reads(shared=shared)
    return Reads(
        tuple(
            sum(edge.tokens for edge in crossed if not edge.to_layers or layer in edge.to_layers)
            for layer in range(component.layers)
        ),
        shared,
    )


def _incoming(model: Model, name: str, otherwise: int) -> int:
    """Tokens per sample that enter a component as its input; `otherwise` where no edge brings any."""
    edges = [edge for edge in model.edges if edge.to == name and not edge.to_layers]
    sequence = sum(edge.tokens for edge in edges if edge.join == "sequence")
    return sequence or max((edge.tokens for edge in edges if edge.join in ("channel", "add")), default=otherwise)
