"""Bytes that Megatron-Core's layers keep for the backward pass, on one tensor-parallel rank.

Per token, in elements, for the Transformer Engine layers (megatron/core/models/gpt/gpt_layer_specs.py; the
local ones keep the same): h is shared out over tp by token under sequence parallelism and whole otherwise; q,
k, v, f are the rank's widths.

    norms        input and output of each branch's norm                             2 h a branch
                 (an extra norm on a branch's output keeps that output)             h each
    masks        dropout of each branch's output, where there is dropout            1 byte h a branch
    core         q, k, v, the core's output, and its statistics: with a fused core the log of the softmax's
                 sum in fp32 by head; without one the softmax over all keys, and with dropout its mask and its
                 result: 2 a s, or 5 a s bytes. Keys and values are then repeated for each query head. A fused
                 core keeps its output by sample, and the projection keeps it by token: two copies for several
                 samples, and where context parallelism exchanges heads for tokens in between.
    latents      multi-head latent attention: each latent and its norm's output     2 (q_rank + kv_rank)
    head norms   their inputs                                                       q + k
    mlp          the activation's input (both halves) and output                    f (halves + 1)
    experts      a dispatched token, the activation's input and output, its weight  top_k (h + f (halves + 1))
                 without a second half the weighing is no part of the activation    top_k (h + 3 f)
    state space  what the input is projected to; the scan's output before its gate, the norm's input and output
    router       its logits and scores in fp32; the map of the permutation in int32

In fp8 the inputs of products are kept in 8 bits: outputs of norms and activations, dispatched tokens, and the
core's output beside the core's own; nvfp4 keeps 4 bits and a scale for each 16. What the core reads, and what
activations do, stays in the run's type
(transformer_engine/pytorch/module/{layernorm_linear,linear,grouped_linear}.py 2.11).

The classic layer of Korthikanti et al. (arXiv:2205.05198), 34 sbh + 5 a s^2 b, follows with dropout and
without a fused core; a bf16 Llama's is (sb/t) [4*2h + 2d(a + 2k) + 2ad + 4a + 6f]. An expert's output needs
no copy, since its weight is applied before the second product (megatron/core/transformer/moe/experts.py and
fusions/fused_bias_swiglu.py, WeightedSwiGLUFunction; transformer_engine/pytorch/permutation.py keeps row maps
alone). Rotary embedding rotates the gradient back and keeps its angles only (Transformer Engine 2.11).
"""

from __future__ import annotations

from functools import lru_cache

from dslaunch.model import state_space
from dslaunch.model.blocks import Attention, Block, blocks, divided
from dslaunch.model.matrices import layer_matrices
from dslaunch.model.params import alike, padded_vocab
from dslaunch.model.passes import Pass
from dslaunch.schema.components import Decoder, Transformer, ViT

_FP32 = 4
_INT32 = 4
IMBALANCE = 1.1
"""Routed tokens of the fullest rank by the mean rank's, under a loss that balances them: 0 to 20 % above what
even routing explains in the functional tests of Megatron-LM core 0.16 (mixtral, 8experts), whose routers are
trained."""
_PRODUCT = {"tensorwise": 1.0, "blockwise": 1.0 + _FP32 / 128, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element with its share of the scales: one for 128 values, for 32, for 16."""
_DROPPED: dict[str, tuple[str, ...]] = {
    "core_attn": ("core statistics",),
    "layernorm": ("norm outputs",),
    "mla_up_proj": ("core inputs",),
    "moe_act": ("expert outputs",),
    "mlp": ("mlp", "mlp norm output"),
    "moe": ("experts", "expert outputs", "mlp", "router"),
    "shared_experts": ("mlp",),
}
"""What each of Megatron's --recompute-modules does not keep (megatron/core/transformer/transformer_config.py
0.16)."""
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "attn_norm": ("norm inputs",),
    "qkv_linear": ("norm outputs",),
    "core_attn": ("core inputs", "core statistics"),
    "attn_proj": ("core outputs",),
    "mlp_norm": ("mlp norm output",),
    "expert_fc1": ("experts",),
    "moe_act": ("expert outputs",),
}
"""What each of --offload-modules keeps in host memory (the same file)."""


def layer_bytes(component: Decoder | Transformer | ViT, run: Pass, layer: int) -> float:
    """Bytes one layer keeps for one sample's backward pass."""
    shape = blocks(component)[layer]
    if run.recompute == "full":
        return run.tokens * run.width * shape.hidden * run.whole
    parts = _parts(shape, run, run.reads.cross_at(layer))
    modules = (run.software.recompute_modules or ("core_attn",)) if run.recompute == "selective" else ()
    dropped = {part for module in modules for part in _dropped(shape, module)}
    dropped |= {part for module in run.software.offloaded_modules for part in _OFFLOADED.get(module, ())}
    return sum(size for part, size in parts.items() if part not in dropped)


def backward_bytes(component: Decoder | Transformer | ViT, run: Pass, layer: int) -> float:
    """Bytes that a layer's backward pass takes on top of what is kept, at its fullest, for one sample.

    The gradient of the layer's output, gathered over tp where tokens are shared out, beside the gradient of
    the activation's output; or that of its input, when both of its own tensors are still there.
    """
    shape = blocks(component)[layer]
    outputs = shape.hidden * run.whole + shape.hidden * (run.sequence_parallel + 1 / run.tp)
    inner = divided(shape.ffn, run.tp)
    dense = max(shape.hidden + inner, shape.halves * inner)
    routed = 0.0
    if shape.experts:
        wide = divided(shape.experts.ffn, run.etp) * shape.halves
        routed = _routed_tokens(shape, run) * max(2 * shape.expert_width, shape.expert_width + wide)
    scan = state_space.backward_bytes(shape.mamba, run.tp, run.width) if shape.mamba else 0.0
    return run.tokens * (run.width * (outputs + max(dense, routed)) + scan)


def head_bytes(component: Decoder, run: Pass) -> float:
    """Bytes of one sample in final norm, head and loss, while the loss is computed.

    Input and output of the norm; logits in the run's type, and the softmax in fp32 that the loss makes and
    keeps (megatron/core/tensor_parallel/cross_entropy.py 0.16: the softmax becomes the gradient in place, and
    is converted while it is still there). The compiled loss has one more copy in fp32 between its parts
    (megatron/core/fusions/fused_cross_entropy.py); Transformer Engine's makes the gradient in place of the
    logits (transformer_engine/pytorch/cross_entropy.py 2.11). Each layer that predicts a further token keeps
    as much.

    Once the loss is done, the head's product for its weight's gradient needs that gradient's shape in the
    run's type, filled or not (megatron/core/tensor_parallel/layers.py), beside the gradients of logits and of
    its input, and the input gathered over tp: the larger of the two moments counts.
    """
    rows = padded_vocab(component, run.tp)
    fused, compiled = run.software.loss == "fused", run.software.loss == "compiled"
    once = 2 * run.width * component.hidden * run.whole + (run.width if fused else _FP32) * rows
    further = once * component.mtp_layers
    beside = 0 if fused or run.width == _FP32 else run.width
    loss = run.tokens * (once + further + (beside + _FP32 * compiled) * rows)
    gathered = 1 + run.sequence_parallel
    product = run.tokens * run.width * (rows + component.hidden * gathered) + run.tokens * further
    return max(loss, product + run.width * rows * component.hidden / run.together)


@lru_cache(maxsize=4096)
def dummy_bytes(component: Decoder | Transformer | ViT, run: Pass, first: int, number: int) -> int:
    """Bytes that stand in for the gradients that fused products do not return: one for each shape of a
    weight.

    Source: Transformer Engine 2.11, transformer_engine/pytorch/module/base.py, get_dummy_wgrad.
    """
    every = blocks(component)
    kinds = alike(component, run.reads, first, number)
    shapes = {shape for layer, _ in kinds for shape in _weights(every[layer], run)}
    return run.width * sum(rows * columns for rows, columns in shapes)


def table_bytes(component: Decoder, run: Pass) -> int:
    """Bytes of the embedding's gradient in the run's type, which autograd makes whole."""
    return run.width * padded_vocab(component, run.tp) * component.hidden


def _weights(layer: Block, run: Pass) -> set[tuple[int, int]]:
    """(output, input) widths of the layer's matrices on a rank; q, k and v are one, as are gate and up."""
    found: dict[tuple[str, int], list[int]] = {}
    for matrix in layer_matrices(layer):
        width_in, width_out = matrix.on_rank(run.etp if matrix.routed else run.tp)
        if matrix.target in ("q", "k", "v") and not any(attention.mla for attention in layer.attentions):
            found.setdefault(("qkv", width_in), []).append(width_out)
        elif matrix.target in ("gate", "up"):
            found.setdefault(("up", width_in), []).append(width_out)
        else:
            found.setdefault((f"{matrix.target} {width_out}", width_in), [width_out])
    return {(sum(outputs), width_in) for (_, width_in), outputs in found.items()}


def _dropped(layer: Block, module: str) -> tuple[str, ...]:
    """The dense MLP's module has no part in a layer of experts, nor theirs in a dense layer."""
    if module == "mlp" and layer.experts:
        return ()
    return _DROPPED.get(module, ())


def _parts(layer: Block, run: Pass, crossed: int) -> dict[str, float]:
    """Bytes by part of the layer, for one sample."""
    hidden = run.tokens * layer.hidden * run.whole
    branches = layer.branches
    post = (layer.norms > branches) + layer.layer_scale
    modulated = layer.modulation // 3 * 2 if layer.modulation % 3 == 0 else layer.modulation // 2
    inner = run.tokens * divided(layer.ffn, run.tp)
    product = _product_width(run)
    attentions = [_attention(each, run, crossed) for each in layer.attentions]
    return {
        "norm inputs": run.width * hidden * (branches * (1 + post) + modulated),
        "norm outputs": product * hidden * (branches - 1),
        "mlp norm output": product * hidden,
        "masks": hidden * branches * run.software.dropout,
        "core inputs": run.width * sum(inputs for inputs, _, _ in attentions),
        "core outputs": run.width * sum(outputs for _, outputs, _ in attentions),
        "core statistics": sum(statistics for _, _, statistics in attentions),
        "mlp": inner * (run.width * layer.halves + product),
        **_state_space(layer, run),
        **_experts(layer, run),
    }


def _attention(attention: Attention, run: Pass, crossed: int) -> tuple[float, float, float]:
    """(elements that the core reads, elements of its output and of latents, bytes of its statistics).

    In 8 bits the projection has a copy of its own of the core's output.
    """
    query, value = attention.query_width(run.tp), attention.value_width(run.tp)
    keys = crossed if attention.cross else run.tokens + run.reads.shared
    heads = divided(attention.heads, run.tp)
    unfused = not run.software.flash_attention
    key_value = query + value if unfused else attention.kv_width(run.tp)
    mla = attention.mla
    latents = 2 * (mla.q_lora_rank + mla.kv_lora_rank) * run.whole if mla else 0.0
    again = not unfused and (run.together > 1 or (run.cp > 1 and run.software.alltoall_context))
    copies = _product_width(run) / run.width if run.software.fp8 != "none" else float(again)
    normed = run.tokens * query + keys * attention.kv_width(run.tp) / 2 if attention.qk_norm else 0.0
    statistics = (
        heads * keys * run.width * (1 + 1.5 * run.software.dropout) if unfused else heads * float(_FP32)
    )
    return (
        run.tokens * query + keys * key_value,
        run.tokens * (value * (1 + copies) + latents) + normed,
        run.tokens * statistics,
    )


def _product_width(run: Pass) -> float:
    """Bytes of an element of a product's kept input, scales included."""
    fp8 = run.software.fp8
    if fp8 == "none":
        return float(run.width)
    return _PRODUCT[fp8]


def _routed_tokens(layer: Block, run: Pass) -> float:
    """Tokens that a rank's experts get for each of its tokens: those of etp ranks, spread by the router."""
    assert layer.experts is not None
    balance = 1.0 if run.software.balanced_routing or run.ep == 1 else IMBALANCE
    return balance * run.etp / run.tp * layer.experts.top_k


def _state_space(layer: Block, run: Pass) -> dict[str, float]:
    if layer.mamba is None:
        return {}
    scan, last = state_space.kept(layer.mamba, run.tp)
    return {"state space": run.tokens * (run.width * scan + _product_width(run) * last)}


def _experts(layer: Block, run: Pass) -> dict[str, float]:
    experts = layer.experts
    if experts is None:
        return {}
    inner = divided(experts.ffn, run.etp)
    weighed = 1 if layer.gated else 2
    tokens = run.tokens * _routed_tokens(layer, run)
    own = run.tokens * run.whole
    return {
        "experts": tokens * (_product_width(run) * layer.expert_width + run.width * inner * layer.halves + _FP32),
        "expert outputs": tokens * inner * (_product_width(run) + run.width * (weighed - 1)),
        "router": own * experts.count * (2 * _FP32 + 2 * _INT32),
    }
