"""Forward FLOPs of one sample's pass, two per multiply-add. Only matrix products are counted.

Backward is twice the forward where inputs and weights get gradients; a plan decides that, not this module.
Summed over layers and tripled, a causal decoder counted with `causal=False` gives the classic
72 B s L h^2 (1 + s/(6h) + V/(12hL)) of Narayanan et al., arXiv:2104.04473, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.model.shapes import block, layers, linears
from dslaunch.schema.model import Component, Decoder, Mlp, ViT


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one sample's pass through a whole component: no split by tp or pp."""

    stem: int
    """Patch embedding; a vocabulary look-up costs none."""
    layer: int
    """One layer, its attention core included."""
    attention_core: int
    """Of `layer`: QK^T and AV, what selective recompute runs twice."""
    layers: int
    tail: int
    """Logits. A tower's pooling head is not counted: where patch tokens are handed on, it does not run."""

    @property
    def total(self) -> int:
        return self.stem + self.layers * self.layer + self.tail


def flops(component: Component, tokens: int, causal: bool = True) -> Flops:
    """FLOPs of one sample's pass of `tokens` tokens.

    Args:
        tokens: sequence length; `ViT.tokens` for a tower, the edge's tokens for a projector.
        causal: count half of a decoder's attention core, as a kernel that skips masked tiles does it. False
            counts all of it, as many published figures do. No effect on a ViT, whose attention has no mask.
    """
    return Flops(
        stem=stem_flops(component),
        layer=layer_flops(component, tokens, causal),
        attention_core=attention_core_flops(component, tokens, causal),
        layers=layers(component),
        tail=tail_flops(component, tokens),
    )


def stem_flops(component: Component) -> int:
    """The patch embedding of one image."""
    if not isinstance(component, ViT):
        return 0
    return 2 * component.patches * component.channels * component.patch**2 * component.hidden


def layer_flops(component: Component, tokens: int, causal: bool = True) -> int:
    """One layer: projections, attention core, MLP; the whole of an Mlp component."""
    if isinstance(component, Mlp):
        return sum(2 * tokens * linear.width_in * linear.width_out for linear in linears(component))
    layer = block(component)
    attention = layer.hidden * (2 * layer.query_width(1) + 2 * layer.kv_width(1))
    mlp = layer.hidden * layer.ffn * (layer.halves + 1)
    return 2 * tokens * (attention + mlp) + attention_core_flops(component, tokens, causal)


def attention_core_flops(component: Component, tokens: int, causal: bool = True) -> int:
    """QK^T and AV of one layer, 2 * tokens^2 * heads * head_dim each; half of it under a causal mask."""
    if isinstance(component, Mlp):
        return 0
    layer = block(component)
    square = 4 * tokens**2 * layer.query_width(1)
    return square // 2 if causal and layer.causal else square


def tail_flops(component: Component, tokens: int) -> int:
    """The logits of every token."""
    return 2 * tokens * component.hidden * component.vocab if isinstance(component, Decoder) else 0
