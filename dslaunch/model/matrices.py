"""The matrices of a component: what parameters, adapters, FLOPs and splits are counted from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from dslaunch.model.blocks import Attention, Block, blocks, further_blocks
from dslaunch.schema.components import Component, Decoder, Mlp, Other, Transformer, ViT


@dataclass(frozen=True)
class Matrix:
    """One linear layer, and how tensor parallelism cuts it."""

    target: str
    """The name by which LoRA chooses it."""
    width_in: int
    width_out: int
    cut: Literal["out", "in", "none"]
    """By its output (column-parallel), by its input (row-parallel), or whole on every rank."""
    bias: bool = False
    units: int = 0
    """Pieces that the cut width consists of (heads); where tp exceeds them, ranks hold replicas. 0: any."""
    copies: int = 1
    """Experts, or sets of weights, of this shape."""
    active: int = 1
    """Copies that a token runs through."""
    runs: Literal["own", "context", "sample"] = "own"
    """Once for each token of the component, for each that it reads, or once a sample."""

    @property
    def routed(self) -> bool:
        """Routed experts, which expert parallelism shares out."""
        return self.target == "experts"

    def on_rank(self, tp: int) -> tuple[int, int]:
        """(input, output) width on one of tp ranks."""
        if self.cut == "out":
            return self.width_in, _piece(self.width_out, self.units, tp)
        if self.cut == "in":
            return _piece(self.width_in, self.units, tp), self.width_out
        return self.width_in, self.width_out

    def params(self, tp: int = 1, ep: int = 1) -> int:
        """Parameters on one rank; a row-parallel bias is whole."""
        width_in, width_out = self.on_rank(tp)
        copies = self.copies // ep if self.routed else self.copies
        return copies * (width_in * width_out + width_out * self.bias)

    def adapter(self, rank: int, tp: int = 1, ep: int = 1) -> int:
        """Parameters of a low-rank adapter on one rank: of its two matrices, one is cut as this one is."""
        copies = self.copies // ep if self.routed else self.copies
        return copies * rank * sum(self.on_rank(tp))


def _piece(width: int, units: int, tp: int) -> int:
    pieces = units or width
    assert pieces % tp == 0 or (units and tp % units == 0), f"{pieces} pieces, tp {tp}"
    return max(1, pieces // tp) * (width // pieces)


@lru_cache(maxsize=512)
def layer_matrices(layer: Block) -> tuple[Matrix, ...]:
    """Every matrix of one transformer layer."""
    return (
        *(matrix for attention in layer.attentions for matrix in _attention(attention)),
        *_state_space(layer),
        *_feed_forward(layer),
        *_routed(layer),
        *_modulation(layer.condition, layer.modulation * layer.hidden),
    )


def stem_matrices(component: Component) -> tuple[Matrix, ...]:
    """Before the first layer: a tower's patch embedding. Tables are looked up, not multiplied."""
    if not isinstance(component, ViT):
        return ()
    pixels = component.channels * component.patch**2 * component.temporal_patch
    return (Matrix("patch", pixels, component.hidden, "none", component.patch_bias),)


def head_matrices(component: Component, tp: int = 1) -> tuple[Matrix, ...]:
    """After the last norm: the vocabulary's head, its rows padded to a multiple of tp, or an output layer."""
    if isinstance(component, Decoder):
        rows = -(-component.vocab // tp) * tp
        return (Matrix("output", component.hidden, rows, "out"),)
    if isinstance(component, Transformer):
        final = component.modulation.final_factors * component.hidden if component.modulation else 0
        condition = component.modulation.width if component.modulation else 0
        output = Matrix("output", component.hidden, component.output, "none", bias=True)
        return (*_modulation(condition, final), *([output] if component.output else []))
    return ()


def pooling_matrices(component: ViT) -> tuple[Matrix, ...]:
    """SigLIP's pooling head: a query attends to the patches, then MLP; keys and values are one matrix."""
    if not component.attention_pooling:
        return ()
    layer = blocks(component)[0]
    q, k, _, o = _attention(layer.attentions[0])
    kv = replace(k, width_out=2 * k.width_out)
    return tuple(replace(m, target="pooling") for m in (q, kv, o, *_feed_forward(layer)))


def mtp_matrices(component: Decoder) -> tuple[Matrix, ...]:
    """Of one layer that predicts a further token: the joining matrix, and the layer's own."""
    parts = (matrix for block in further_blocks(component) for matrix in layer_matrices(block))
    return (Matrix("mtp", 2 * component.hidden, component.hidden, "none"), *parts)


def mlp_matrices(component: Mlp) -> tuple[Matrix, ...]:
    """An MLP's linear layers, first to last.

    They come in pairs: the first is cut by its output, the second by its input; an odd last one by its input
    too, so that each matrix is divided by tp. With inner norms, which need whole widths, none is cut.
    """
    return tuple(_mlp_matrices(component))


@lru_cache(maxsize=512)
def tensor_sizes(component: Component) -> tuple[int, ...]:
    """Elements of each matrix of the layers, and of the vocabulary's; vectors are next to nothing beside them.

    A layer's experts may be one tensor. None where a component's parts are not known.
    """
    if isinstance(component, Other):
        return ()
    if isinstance(component, Mlp):
        return tuple(matrix.params() for matrix in mlp_matrices(component))
    table = (component.vocab * component.hidden,) if isinstance(component, Decoder) else ()
    return (*table, *(matrix.params() for layer in blocks(component) for matrix in layer_matrices(layer)))


def _mlp_matrices(component: Mlp) -> Iterator[Matrix]:
    last = len(component.dims) - 2
    for i, (width_in, width_out) in enumerate(pairwise(component.dims)):
        column = i % 2 == 0 and i < last
        cut: Literal["out", "in", "none"] = (
            "none" if component.inner_norms else "out" if column else "in"
        )
        matrix = Matrix(
            "up" if column else "down", width_in, width_out, cut, component.bias, copies=component.categories
        )
        yield matrix
        if component.gated and i == 0:
            yield replace(matrix, target="gate")


def _attention(attention: Attention) -> tuple[Matrix, ...]:
    if attention.mla:
        return _latent_attention(attention)
    hidden, heads, kv, bias = attention.hidden, attention.heads, attention.kv_heads, attention.qkv_bias
    runs: Literal["own", "context"] = "context" if attention.cross else "own"
    key = Matrix("k", attention.reads, kv * attention.head_dim, "out", bias, units=kv, runs=runs)
    return (
        Matrix("q", hidden, heads * attention.head_dim, "out", bias, units=heads),
        key,
        replace(key, target="v", width_out=kv * attention.value_dim),
        Matrix("o", heads * attention.value_dim, hidden, "in", attention.out_bias, units=heads),
    )


def _latent_attention(attention: Attention) -> tuple[Matrix, ...]:
    """DeepSeek's: down-projections are whole on every rank, up-projections are cut by heads."""
    mla, hidden, heads = attention.mla, attention.hidden, attention.heads
    assert mla is not None
    queries = heads * attention.head_dim
    up = Matrix("q", mla.q_lora_rank or hidden, queries, "out", units=heads)
    down = [Matrix("q", hidden, mla.q_lora_rank, "none", attention.qkv_bias)] if mla.q_lora_rank else []
    keys_and_values = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        *down,
        up,
        Matrix("k", hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, "none", attention.qkv_bias),
        Matrix("v", mla.kv_lora_rank, keys_and_values, "out", units=heads),
        Matrix("o", heads * attention.value_dim, hidden, "in", attention.out_bias, units=heads),
    )


def _state_space(layer: Block) -> tuple[Matrix, ...]:
    """Mamba-2's projections, cut by groups of heads (megatron/core/ssm/mamba_mixer.py, 0.16)."""
    mamba = layer.mamba
    if mamba is None:
        return ()
    return (
        Matrix("mamba_in", layer.hidden, mamba.projected, "out", units=mamba.groups),
        Matrix("mamba_out", mamba.inner, layer.hidden, "in", units=mamba.groups),
    )


def _feed_forward(layer: Block) -> tuple[Matrix, ...]:
    if layer.ffn == 0:
        return ()
    up = Matrix("up", layer.hidden, layer.ffn, "out", layer.mlp_bias)
    down = Matrix("down", layer.ffn, layer.hidden, "in", layer.mlp_bias)
    return (up, replace(up, target="gate"), down) if layer.gated else (up, down)


def _routed(layer: Block) -> tuple[Matrix, ...]:
    """The router, whole on every rank, and the routed experts."""
    experts = layer.experts
    if experts is None:
        return ()
    wide = layer.expert_width
    up = Matrix("experts", wide, experts.ffn, "out", layer.mlp_bias, copies=experts.count, active=experts.top_k)
    down = replace(up, width_in=experts.ffn, width_out=wide, cut="in")
    narrowed = Matrix("latent", layer.hidden, wide, "none")
    latent = (narrowed, replace(narrowed, width_in=wide, width_out=layer.hidden)) if experts.latent else ()
    gate = [Matrix("router", layer.hidden, 1, "none")] if experts.shared_gate else []
    router = Matrix("router", layer.hidden, experts.count, "none", experts.biased_router)
    return (router, *gate, *latent, *([up] * layer.halves), down)


def _modulation(width: int, out: int) -> tuple[Matrix, ...]:
    return (Matrix("modulation", width, out, "none", bias=True, runs="sample"),) if out else ()
