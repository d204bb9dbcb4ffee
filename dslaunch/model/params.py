"""Exact parameter counts: of a component, and of what one rank of its tp x pp grid computes with."""

from __future__ import annotations

from dslaunch.model.shapes import Block, block, divided, layers, linears
from dslaunch.schema.model import Component, Decoder, Mlp, ViT


def params(component: Component) -> int:
    """Parameters of the whole component."""
    return params_on_rank(component, 1, 0, layers(component))


def trainable(component: Component) -> int:
    """Parameters that get a gradient."""
    return 0 if component.train == "nothing" else params(component)


def params_on_rank(component: Component, tp: int, first_layer: int, num_layers: int) -> int:
    """Parameters that one of tp ranks computes with, in a stage of `num_layers` from `first_layer` on.

    The stage with layer 0 also has the embedding, the one with the last layer the final norm and the head;
    a tied table stands on both. Matrices, their column-parallel biases and the vocabulary (padded to a
    multiple of tp) are divided by tp. Norms, row-parallel biases, positions, patch embedding, class and
    register tokens are on every rank, and so are kv heads where tp > kv_heads.
    """
    total = layers(component)
    assert 0 <= first_layer < first_layer + num_layers <= total, (first_layer, num_layers, total)
    if isinstance(component, Mlp):
        return _mlp(component, tp)
    first, last = first_layer == 0, first_layer + num_layers == total
    ends = (_stem(component, tp) if first else 0) + (_tail(component, tp, with_stem=first) if last else 0)
    return ends + num_layers * _layer(block(component), tp)


def padded_vocab(component: Decoder, tp: int) -> int:
    """Rows of the vocabulary on one rank: ceil(vocab / tp)."""
    return -(-component.vocab // tp)


def _stem(component: Decoder | ViT, tp: int) -> int:
    if isinstance(component, Decoder):
        positions = component.max_positions if component.position == "learned" else 0
        return (padded_vocab(component, tp) + positions) * component.hidden
    hidden = component.hidden
    patch = component.channels * component.patch**2 * hidden + hidden * component.patch_bias
    pre_norm = 2 * hidden * component.pre_norm
    return patch + (component.class_token + component.registers + _positions(component)) * hidden + pre_norm


def _positions(component: ViT) -> int:
    """Rows of the position table.

    The class token has a row of its own (CLIP, DINOv2), except in towers with registers: timm's
    vit_*_reg4_dinov2 set no_embed_class and fold that row into the token (timm 1.0,
    timm/models/vision_transformer.py).
    """
    return component.patches + (component.class_token and component.registers == 0)


def _tail(component: Decoder | ViT, tp: int, *, with_stem: bool) -> int:
    hidden = component.hidden
    if isinstance(component, Decoder):
        shared = component.tied_embeddings and with_stem
        return block(component).norm + (0 if shared else padded_vocab(component, tp) * hidden)
    post_norm = 2 * hidden * component.post_norm
    return post_norm + (_pooling(block(component), tp) if component.attention_pooling else 0)


def _pooling(layer: Block, tp: int) -> int:
    """SigLIP's head: a learnt query attends to the patches, then MLP; one norm less than a layer."""
    query = layer.hidden
    scales = 2 * layer.hidden * layer.layer_scale
    return query + _layer(layer, tp) - layer.norm - scales


def _layer(layer: Block, tp: int) -> int:
    hidden, ffn = layer.hidden, layer.ffn_width(tp)
    query, qkv = layer.query_width(tp), layer.query_width(tp) + 2 * layer.kv_width(tp)
    attention = hidden * (qkv + query) + qkv * layer.qkv_bias + hidden * layer.out_bias
    mlp = hidden * ffn * (layer.halves + 1) + (ffn * layer.halves + hidden) * layer.mlp_bias
    return attention + mlp + 2 * layer.norm + 2 * hidden * layer.layer_scale


def _mlp(component: Mlp, tp: int) -> int:
    count = 2 * component.dims[0] * component.norm
    for linear in linears(component):
        count += divided(linear.cut, tp) * (linear.width_in if linear.column else linear.width_out)
        bias = divided(linear.width_out, tp) if linear.column else linear.width_out
        count += bias * component.bias
    return count
