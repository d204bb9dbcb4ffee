"""Bytes that one sample leaves for the backward pass, on one tensor-parallel rank.

Kept by a layer, with fused (flash) attention and no dropout, in elements per token. `h` terms are whole on
every rank unless sequence parallelism cuts them; the rest is cut by tp. q, k, v, o and f are the rank's widths:

    each branch (attention, cross-attention, MLP): input and output of its norm    2 h     whole
    branch outputs, where a LayerScale or a norm of their own follows              h each  whole
    adaptive norms: what a scale or a gate multiplies                              h each  whole
    q, k, v (a kv head is replicated where tp > kv_heads), k and v of what is read  q + k + v
    inputs of the norms of query and key heads                                     q + k
    latents of multi-head latent attention and their norms' outputs                2 (q_rank + kv_rank)  whole
    attention output = input of the output projection                              o
    gate, up and their product (fused SwiGLU), or                                  3 f
    input and output of GELU                                                       2 f
    routed experts: dispatched token, inner widths, output before it is weighted   top_k (2 h + 2-3 f)

and 4 bytes per head: the softmax statistics of the attention kernel, in fp32; the router's logits too. For a
bf16 Llama this is (sb/t) [4*2h + 2d(a+2k) + 2ad + 4a + 6f]; the classic layer's 34 sbh of Korthikanti et al.
(arXiv:2205.05198) less the two dropout masks and the s^2 terms, which flash attention does not keep. An unfused
SwiGLU keeps f more (the output of SiLU), an RMSNorm made of single operations several h more: not counted here.
A norm's own statistics, the image's pixels and the embedding's indices are below 0.1 % of a layer and left out.
Adapters keep rank more elements a matrix, below 1 % at rank 32: left out; their matrices' inputs stay.
"""

from __future__ import annotations

from dslaunch.model.blocks import Attention, Block, blocks, divided
from dslaunch.model.matrices import Matrix, mlp_matrices
from dslaunch.model.params import padded_vocab
from dslaunch.model.passes import Pass
from dslaunch.schema.components import Component, Decoder, Mlp, Other

_FP32 = 4
_MIB = 2**20
IMBALANCE = 1.2
"""Routed tokens on the fullest expert-parallel rank by those of the mean one. Auxiliary losses and biases keep it
near one; without them a published case took 215 in place of 146 GB."""


def layer_bytes(component: Component, run: Pass, layer: int = 0) -> float:
    """Bytes one layer keeps for one sample's backward pass; the whole of a component without layers."""
    if isinstance(component, Other):
        return component.activation_mib * _MIB * run.width / 2
    if isinstance(component, Mlp):
        full = run.recompute == "full"
        return run.tokens * run.width * (component.dims[0] * run.whole if full else _mlp_elements(component, run))
    shape = blocks(component)[layer]
    if run.recompute == "full":
        return run.tokens * run.width * shape.hidden * run.whole
    crossed = run.reads.cross_at(layer)
    return run.width * _layer_elements(shape, run, crossed) + _FP32 * _statistics(shape, run)


def logits_bytes(component: Component, run: Pass) -> float:
    """Bytes the last stage keeps for one sample: inputs of final norm and head, and the logits in fp32.

    4sbh/t (1 + V/h) in bf16 under sequence parallelism (arXiv:2205.05198, section 4.3), for a loss that is
    neither fused with the head nor chunked, and again for each layer that predicts a further token. 0 for a
    component without a vocabulary.
    """
    if not isinstance(component, Decoder):
        return 0.0
    once = 2 * run.width * component.hidden * run.whole + _FP32 * padded_vocab(component, run.tp)
    return run.tokens * once * (1 + component.mtp_layers)


def _layer_elements(layer: Block, run: Pass, crossed: int) -> float:
    """Elements of one sample's pass through a layer."""
    branches = layer.branches
    post = layer.norms > branches
    per_branch = 2 + post + layer.layer_scale
    outside = layer.hidden * run.whole * (branches * per_branch + _modulated(layer.modulation))
    attention = sum(_attention_elements(each, run, crossed) for each in layer.attentions)
    return (
        run.tokens * (outside + divided(layer.ffn, run.tp) * (layer.halves + 1))
        + run.tokens * _routed_elements(layer, run)
        + attention
    )


def _modulated(factors: int) -> int:
    """Tensors of hidden width that (shift, scale, gate) triples or (shift, scale) pairs multiply."""
    return factors // 3 * 2 if factors % 3 == 0 else factors // 2


def _attention_elements(attention: Attention, run: Pass, crossed: int) -> float:
    query, value, kv = attention.query_width(run.tp), attention.value_width(run.tp), attention.kv_width(run.tp)
    keys = crossed if attention.cross else run.tokens + run.reads.shared
    normed = run.tokens * query + keys * kv / 2 if attention.qk_norm else 0.0
    mla = attention.mla
    latents = 2 * (mla.q_lora_rank + mla.kv_lora_rank) * run.whole if mla else 0.0
    return run.tokens * (query + value + latents) + keys * kv + normed


def _routed_elements(layer: Block, run: Pass) -> float:
    """Elements per token of the fullest rank's routed experts."""
    experts = layer.experts
    if experts is None:
        return 0.0
    inner = divided(experts.ffn, run.tp) * (layer.halves + 1)
    return (IMBALANCE if run.ep > 1 else 1.0) * experts.top_k * (2 * layer.hidden + inner)


def _statistics(layer: Block, run: Pass) -> float:
    """fp32 values: of the softmax, unless it runs again, and of the router."""
    heads = 0 if run.recompute == "selective" else sum(divided(a.heads, run.tp) for a in layer.attentions)
    router = layer.experts.count * run.whole if layer.experts else 0
    return run.tokens * (heads + router)


def _mlp_elements(component: Mlp, run: Pass) -> float:
    """The input of each linear layer and of each GELU, of norms, and both halves of a gated layer."""
    norm_input = component.dims[0] * run.whole if component.norm else 0.0
    inner = sum(component.dims[1:-1]) * run.whole if component.inner_norms else 0.0
    parts = mlp_matrices(component)
    linear = sum(_linear_elements(m, m is parts[-1], run) for m in parts if m.target != "gate")
    gate = sum(m.on_rank(run.tp)[1] for m in parts if m.target == "gate")
    return norm_input + inner + linear + gate


def _linear_elements(matrix: Matrix, last: bool, run: Pass) -> float:
    width_in, width_out = matrix.on_rank(run.tp)
    if matrix.cut == "out":
        return width_in * run.whole + width_out
    gelu_input = 0.0 if last else width_out * run.whole
    return (width_in if matrix.cut == "in" else width_in * run.whole) + gelu_input
