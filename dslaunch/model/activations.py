"""Bytes that one sample leaves for the backward pass, on one tensor-parallel rank.

Kept by a layer, with fused (flash) attention and no dropout, in elements per token. `h` terms are whole on
every rank unless sequence parallelism cuts them; the rest is cut by tp. q, kv and f are the rank's widths:

    input of each of the two norms                         2 h     whole
    output of each norm = input of the next projection     2 h     whole
    branch outputs, where a LayerScale multiplies them     2 h     whole
    q, k, v (a kv head is replicated where tp > kv_heads)  q + 2 kv
    attention output = input of the output projection      q
    gate, up and their product (fused SwiGLU), or          3 f
    input and output of GELU                               2 f

and 4 bytes per head: the softmax statistics of the attention kernel, in fp32. For a bf16 Llama this is
(sb/t) [4*2h + 2d(a+2k) + 2ad + 4a + 6f]; the classic layer's 34 sbh of Korthikanti et al. (arXiv:2205.05198)
less the two dropout masks and the s^2 terms, which flash attention does not keep. An unfused SwiGLU keeps f
more (the output of SiLU), an RMSNorm made of single operations several h more: not counted here. A norm's
own statistics, the image's pixels and the embedding's indices are below 0.1 % of a layer and left out.
"""

from __future__ import annotations

from dslaunch.model.params import padded_vocab
from dslaunch.model.shapes import Block, Linear, block, divided, linears
from dslaunch.schema.model import Component, Decoder, Mlp

_FP32 = 4


def layer_bytes(
    component: Component, tokens: int, tp: int, sequence_parallel: bool, recompute: str, width: int = 2
) -> float:
    """Bytes one layer keeps for one sample's backward pass; for an Mlp, the whole of it.

    Args:
        tokens: tokens of the sample's pass.
        sequence_parallel: what is outside the cut matrices is shared out over tp by token.
        recompute: `none`; `selective`: attention's core runs again from q, k and v, which stay, as does its
            output, the input of the output projection: with flash attention only the softmax statistics
            go (megatron-core 0.16.1, megatron/core/transformer/attention.py, checkpoints the core alone;
            its transformer_config.py warns that a fused core has no need of it);
            `full`: the layer's input stays, and `working_set_bytes` come back in the backward pass.
        width: bytes of an element: 2 for bf16 and fp16, 4 for fp32.
    """
    whole = 1 / tp if sequence_parallel else 1.0
    if isinstance(component, Mlp):
        elements = component.dims[0] * whole if recompute == "full" else _mlp_elements(component, tp, whole)
        return tokens * width * elements
    layer = block(component)
    if recompute == "full":
        return tokens * width * layer.hidden * whole
    statistics = 0 if recompute == "selective" else _FP32 * divided(layer.heads, tp)
    return tokens * (width * _layer_elements(layer, tp, whole) + statistics)


def working_set_bytes(
    component: Component, tokens: int, tp: int, sequence_parallel: bool, width: int = 2
) -> float:
    """What full recompute adds while one layer's backward runs: all that the layer keeps but its input."""
    every = layer_bytes(component, tokens, tp, sequence_parallel, "none", width)
    return every - layer_bytes(component, tokens, tp, sequence_parallel, "full", width)


def logits_bytes(
    component: Component, tokens: int, tp: int, sequence_parallel: bool, width: int = 2
) -> float:
    """Bytes the last stage keeps for one sample: inputs of final norm and head, and the logits in fp32.

    4sbh/t (1 + V/h) in bf16 under sequence parallelism (arXiv:2205.05198, section 4.3), for a loss that is
    neither fused with the head nor chunked. 0 for a component without a vocabulary.
    """
    if not isinstance(component, Decoder):
        return 0.0
    whole = 1 / tp if sequence_parallel else 1.0
    return tokens * (2 * width * component.hidden * whole + _FP32 * padded_vocab(component, tp))


def _layer_elements(layer: Block, tp: int, whole: float) -> float:
    outside = layer.hidden * whole * (6 if layer.layer_scale else 4)
    attention = 2 * layer.query_width(tp) + 2 * layer.kv_width(tp)
    return outside + attention + layer.ffn_width(tp) * (layer.halves + 1)


def _mlp_elements(component: Mlp, tp: int, whole: float) -> float:
    """The input of each linear layer and of each GELU, and of the norm where there is one."""
    norm_input = component.dims[0] * whole if component.norm else 0.0
    return norm_input + sum(_linear_elements(linear, tp, whole) for linear in linears(component))


def _linear_elements(linear: Linear, tp: int, whole: float) -> float:
    if linear.column:
        return linear.width_in * whole + divided(linear.width_out, tp)
    gelu_input = 0.0 if linear.last else linear.width_out * whole
    return divided(linear.width_in, tp) + gelu_input
