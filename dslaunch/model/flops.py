"""Forward FLOPs of one sample's pass, two per multiply-add. Only matrix products are counted.

Backward is twice the forward where inputs and weights get gradients; a plan decides that, not this module.
Summed over layers and tripled, a causal decoder counted with `causal=False` gives the classic
72 B s L h^2 (1 + s/(6h) + V/(12hL)) of Narayanan et al., arXiv:2104.04473, section 3. A token runs through the
router, its top k of the routed experts and the shared ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from dslaunch.model import state_space
from dslaunch.model.blocks import Attention, Block, blocks, further_blocks
from dslaunch.model.matrices import (
    Matrix,
    head_matrices,
    layer_matrices,
    mlp_matrices,
    mtp_matrices,
    stem_matrices,
)
from dslaunch.model.tokens import ALONE, Reads
from dslaunch.schema.components import Component, Decoder, Mlp, Other


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one sample's pass through a whole component: no split by tp or pp."""

    stem: int
    """Patch embedding; a vocabulary look-up costs none."""
    layers: tuple[int, ...]
    """Each layer, its attention core included."""
    attention_cores: tuple[int, ...]
    """Of each layer: QK^T and AV, what selective recompute runs twice."""
    tail: int
    """Logits. A tower's pooling head is not counted: where patch tokens are handed on, it does not run."""

    @property
    def total(self) -> int:
        return self.stem + sum(self.layers) + self.tail


@lru_cache(maxsize=1024)
def flops(component: Component, tokens: int, causal: bool = True, reads: Reads = ALONE) -> Flops:
    """FLOPs of one sample's pass of `tokens` tokens.

    Args:
        tokens: sequence length; `ViT.tokens` for a tower, the edge's tokens for a projector.
        causal: count half of a decoder's attention core, as a kernel that skips masked tiles does it. False
            counts all of it, as many published figures do. No effect on a ViT, whose attention has no mask.
        reads: tokens of other components that attention reads.
    """
    number = 1 if isinstance(component, Mlp | Other) else component.layers
    return Flops(
        stem=stem_flops(component),
        layers=tuple(layer_flops(component, tokens, causal, layer, reads) for layer in range(number)),
        attention_cores=tuple(
            attention_core_flops(component, tokens, causal, layer, reads) for layer in range(number)
        ),
        tail=tail_flops(component, tokens, causal),
    )


def stem_flops(component: Component) -> int:
    """The patch embedding of one image."""
    return _matrix_flops(stem_matrices(component), getattr(component, "patches", 0), 0)


def layer_flops(
    component: Component, tokens: int, causal: bool = True, layer: int = 0, reads: Reads = ALONE
) -> int:
    """One layer: projections, attention core, MLP; the whole of a component without layers."""
    if isinstance(component, Other):
        return round(component.gflops * 1e9)
    if isinstance(component, Mlp):
        return _matrix_flops(mlp_matrices(component), tokens, 0)
    block = blocks(component)[layer]
    products = _matrix_flops(layer_matrices(block), tokens, reads.cross_at(layer))
    products += tokens * state_space.scan_flops(block.mamba) if block.mamba else 0
    return products + attention_core_flops(component, tokens, causal, layer, reads)


def attention_core_flops(
    component: Component, tokens: int, causal: bool = True, layer: int = 0, reads: Reads = ALONE
) -> int:
    """QK^T and AV of one layer: 2 * query-key pairs * heads * (head_dim + value_dim).

    A query sees tokens^2 keys, half of them under a causal mask, fewer in a window, and all that it reads of
    other components.
    """
    if isinstance(component, Mlp | Other):
        return 0
    return _core(blocks(component)[layer], tokens, causal, reads.cross_at(layer), reads.shared)


def tail_flops(component: Component, tokens: int, causal: bool = True) -> int:
    """The logits of every token, and the layers that predict further tokens, with theirs."""
    once = _matrix_flops(head_matrices(component), tokens, 0)
    if not isinstance(component, Decoder) or component.mtp_layers == 0:
        return once
    further = _matrix_flops(mtp_matrices(component), tokens, 0)
    further += sum(_core(block, tokens, causal, 0, 0) for block in further_blocks(component))
    return once + component.mtp_layers * (once + further)


def _core(layer: Block, tokens: int, causal: bool, crossed: int, shared: int) -> int:
    return sum(
        2
        * (tokens * crossed if attention.cross else _pairs(attention, tokens, causal, shared))
        * attention.heads
        * (attention.head_dim + attention.value_dim)
        for attention in layer.attentions
    )


def _pairs(attention: Attention, tokens: int, causal: bool, shared_tokens: int) -> int:
    """Query-key pairs of one head of a self-attention."""
    shared = tokens * shared_tokens
    window = attention.window if 0 < attention.window < tokens else 0
    if not (causal and attention.causal):
        return tokens * (window or tokens) + shared
    # Under a window the first `window` queries see as many keys as stand before them, the others `window`.
    return (window * tokens - window**2 // 2 if window else tokens**2 // 2) + shared


def _matrix_flops(parts: Iterable[Matrix], own: int, context: int) -> int:
    runs = {"own": own, "context": context, "sample": 1}
    return sum(2 * runs[m.runs] * m.active * m.width_in * m.width_out for m in parts)
