"""Exact parameter counts: of a component, and of what one rank of its tp x pp grid computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dslaunch.model import state_space
from dslaunch.model.blocks import Block, blocks, divided, further_blocks
from dslaunch.model.matrices import (
    Matrix,
    head_matrices,
    layer_matrices,
    mlp_matrices,
    mtp_matrices,
    pooling_matrices,
    stem_matrices,
)
from dslaunch.model.shapes import layers
from dslaunch.model.tokens import Reads
from dslaunch.schema.components import Component, Decoder, Mlp, Other, Transformer, ViT
from dslaunch.schema.layer import Lora


@dataclass(frozen=True)
class Counts:
    """Parameters of one stage on one rank."""

    total: int = 0
    """All, adapters included."""
    trained: int = 0
    """Of `total`: those that get a gradient."""
    experts: int = 0
    """Of `total`: routed experts, whose replicas are fewer by ep."""
    trained_experts: int = 0
    packed: int = 0
    """Of `total`: frozen matrices that QLoRA keeps in 4 bits."""
    products: int = 0
    """Of `total`: matrices of layers, adapters apart."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, number: int) -> Counts:
        """Of `number` equal parts."""
        return Counts(*(value * number for value in vars(self).values()))


@dataclass(frozen=True)
class _Part:
    """The stem, one layer, or the tail."""

    matrices: tuple[Matrix, ...]
    vectors: int
    """Norms, scales, tables: not cut any further."""
    trains: bool
    """As `train: layers` has it."""
    in_layer: bool = False
    further: tuple[Matrix, ...] = ()
    """Of `matrices`: those of layers that predict further tokens, which have the type of a layer's products
    (megatron/core/transformer/multi_token_prediction.py, _build_layers, 0.16.1)."""


def params(component: Component) -> int:
    """Parameters of the whole component, adapters included."""
    return params_on_rank(component, 1, 0, layers(component))


def trainable(component: Component) -> int:
    """Parameters that get a gradient."""
    return counts(component, 1, 0, layers(component)).trained


def active(component: Component) -> int:
    """Parameters that one token runs through: of routed experts, its top k."""
    if not isinstance(component, Decoder) or component.experts is None:
        return params(component)
    routed = counts(component, 1, 0, component.layers).experts
    return params(component) - routed + routed * component.experts.top_k // component.experts.count


def params_on_rank(component: Component, tp: int, first_layer: int, num_layers: int, ep: int = 1) -> int:
    """Parameters that one of tp ranks computes with, in a stage of `num_layers` from `first_layer` on.

    The stage with layer 0 also has the embedding, the one with the last layer the final norm and the head;
    a tied table stands on both. Matrices, their column-parallel biases and the vocabulary (padded to a
    multiple of tp) are divided by tp, routed experts by ep too. Norms, row-parallel biases, positions, patch
    embedding, class and register tokens, a transformer's token table, routers, latent attention's
    down-projections and adaptive norms' projections are on every rank, and so are kv heads where tp > kv_heads.
    """
    return counts(component, tp, first_layer, num_layers, ep).total


@lru_cache(maxsize=4096)
def counts(
    component: Component, tp: int, first_layer: int, num_layers: int, ep: int = 1, etp: int | None = None,
    tail: bool | None = None,
) -> Counts:  # fmt: skip
    """What one rank of a stage holds, by how it is kept; see `params_on_rank`.

    Args:
        etp: tensor-parallel ranks that share a routed expert; tp where it is None.
        tail: whether final norm and head stand there; None: with the last layer.
    """
    total = layers(component)
    assert 0 <= first_layer < first_layer + num_layers <= total, (first_layer, num_layers, total)
    found = Counts()
    with_tail = first_layer + num_layers == total if tail is None else tail
    for part, number in Counter(_parts(component, tp, first_layer, num_layers, with_tail)).items():
        found += _count(component, part, tp, ep, etp or tp).times(number)
    return found


def padded_vocab(component: Decoder, tp: int) -> int:
    """Rows of the vocabulary on one rank: ceil(vocab / tp)."""
    return -(-component.vocab // tp)


def trained_layers(component: Component) -> frozenset[int]:
    """Layers whose own parameters train, adapters apart."""
    total = layers(component)
    if component.train == "layers":
        return frozenset(layer % total for layer in component.train_layers)
    return frozenset(range(total)) if component.train == "all" else frozenset()


@lru_cache(maxsize=4096)
def alike(component: Component, reads: Reads, first: int, number: int) -> tuple[tuple[int, int], ...]:
    """(the first of layers that are alike, how many there are) for each kind among `number` from `first` on."""
    if isinstance(component, Mlp | Other):
        return tuple((at, 1) for at in range(first, first + number))
    trained = trained_layers(component)
    kinds: dict[object, list[int]] = {}
    for at in range(first, first + number):
        kinds.setdefault((blocks(component)[at], reads.cross_at(at), at in trained), []).append(at)
    return tuple((found[0], len(found)) for found in kinds.values())


def _parts(component: Component, tp: int, first: int, number: int, with_tail: bool) -> Iterator[_Part]:
    if isinstance(component, Mlp):
        yield _Part(mlp_matrices(component), _mlp_norms(component), component.train == "all", in_layer=True)
        return
    if isinstance(component, Other):
        yield _Part((), component.params, component.train == "all")
        return
    chosen = trained_layers(component)
    with_stem = first == 0
    if with_stem:
        yield _Part(stem_matrices(component), _stem_vectors(component, tp), _end_trains(component, "stem"))
    for index, layer in enumerate(blocks(component)[first : first + number], first):
        yield _Part(layer_matrices(layer), _layer_vectors(layer, tp), index in chosen, in_layer=True)
    if with_tail:
        yield _tail(component, tp, with_stem=with_stem)


def _end_trains(component: Component, end: str) -> bool:
    return component.train == "all" or end in component.train_ends


def _count(component: Component, part: _Part, tp: int, ep: int, etp: int) -> Counts:
    experts = sum(matrix.params(etp, ep) for matrix in part.matrices if matrix.routed)
    dense = sum(matrix.params(tp) for matrix in part.matrices if not matrix.routed)
    base = part.vectors + experts + dense
    products = (experts + dense) * part.in_layer
    products += sum(matrix.params(etp, ep) if matrix.routed else matrix.params(tp) for matrix in part.further)
    if component.lora is None:
        return Counts(base, base * part.trains, experts, experts * part.trains, 0, products)
    added = _adapters(part.matrices, component.lora, isinstance(component, Mlp), tp, ep)
    routed = tuple(matrix for matrix in part.matrices if matrix.routed)
    expert_adapters = _adapters(routed, component.lora, False, tp, ep)
    packed = sum(matrix.params(tp, ep) for matrix in part.matrices) if part.in_layer else 0
    copied = base * part.trains
    return Counts(
        base + added + copied, added + copied, experts + expert_adapters, expert_adapters,
        packed if component.train == "qlora" else 0, products,
    )  # fmt: skip


def _adapters(parts: tuple[Matrix, ...], lora: Lora, every: bool, tp: int, ep: int) -> int:
    """Adapters of the targeted matrices; a fused query-key-value matrix has one input side for the three."""
    total = 0
    for matrix in parts:
        if every or matrix.target in lora.targets:
            total += matrix.adapter(lora.rank, tp, ep)
        elif "qkv" in lora.targets and matrix.target in ("q", "k", "v"):
            width_in, width_out = matrix.on_rank(tp)
            total += lora.rank * (width_out + (width_in if matrix.target == "q" else 0))
    return total


def _layer_vectors(layer: Block, tp: int) -> int:
    scales = 2 * layer.hidden * layer.layer_scale
    inner = sum(2 * attention.qk_norm for attention in layer.attentions)
    latents = sum(
        attention.mla.q_lora_rank + attention.mla.kv_lora_rank for attention in layer.attentions if attention.mla
    )
    sinks = sum(divided(attention.heads, tp) for attention in layer.attentions if attention.sinks)
    scan = state_space.vectors(layer.mamba, tp) if layer.mamba else 0
    return layer.norms * layer.norm + layer.context_norm + scales + inner + latents + sinks + scan


def _stem_vectors(component: Decoder | Transformer | ViT, tp: int) -> int:
    hidden = component.hidden
    if isinstance(component, Decoder):
        positions = component.max_positions if component.position == "learned" else 0
        return (padded_vocab(component, tp) + positions) * hidden
    norm = hidden * (2 if component.norm == "layernorm" else 1) * component.pre_norm
    if isinstance(component, Transformer):
        buckets = component.position_buckets * component.heads
        return (component.vocab + component.positions + component.queries) * hidden + buckets + norm
    return (component.class_token + component.registers + _positions(component)) * hidden + norm


def _positions(component: ViT) -> int:
    """Rows of the position table.

    The class token has a row of its own (CLIP, DINOv2), except in towers with registers: timm's
    vit_*_reg4_dinov2 set no_embed_class and fold that row into the token (timm 1.0,
    timm/models/vision_transformer.py).
    """
    if component.position == "rope" and component.position_rows is None:
        return 0
    return component.position_rows or component.patches + (component.class_token and component.registers == 0)


def _tail(component: Decoder | Transformer | ViT, tp: int, *, with_stem: bool) -> _Part:
    trains, norm = _end_trains(component, "tail"), component.hidden * (2 if component.norm == "layernorm" else 1)
    if isinstance(component, ViT):
        pooling = pooling_matrices(component)
        layer = blocks(component)[0]
        # The pooling head's learnt query, and one norm.
        vectors = norm * component.post_norm + (component.hidden + layer.norm if pooling else 0)
        return _Part(pooling, vectors, trains)
    if isinstance(component, Transformer):
        affine = component.post_norm and component.norm_affine
        return _Part(head_matrices(component), norm * affine, trains)
    shared = component.tied_embeddings and with_stem
    head = () if shared else head_matrices(component, tp)
    further = predicting = mtp_matrices(component) * component.mtp_layers
    if component.mtp_layers and not with_stem:
        # Further tokens are embedded where they are predicted (megatron/core/models/gpt/gpt_model.py, 0.16).
        further = (*further, *head_matrices(component, tp))
    inner = sum(_layer_vectors(block, tp) for block in further_blocks(component))
    own_norms = component.mtp_layers * (3 * norm + inner)
    return _Part((*head, *further), norm + own_norms, trains, further=predicting)


def _mlp_norms(component: Mlp) -> int:
    per_width = 2 if component.norm_kind == "layernorm" else 1
    first = component.dims[0] // (component.merge if component.norm_before_merge else 1)
    inner = sum(component.dims[1:-1]) if component.inner_norms else 0
    return component.categories * per_width * (first * component.norm + inner)
