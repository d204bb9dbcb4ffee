"""Bytes that layers of Hugging Face's and plain PyTorch modules leave for the backward pass.

Autograd keeps what each operation's derivative reads. In bytes a token and rank, w bytes an element (2 in
bf16), for single operations; what is compiled, or a kernel of its own, keeps less:

    LayerNorm, or RMSNorm as one kernel        w h   its input
    RMSNorm as single operations               4 h   its input in fp32; w h more where its weight trains,
                                                     4 h by torch's own on CPUs
    input of a linear layer                    w in  once for all that read it, where one of them trains
    input of an adapter                        w in for each adapter, and 1 for each mask of its dropout
    flash attention                            w (q + k + v + o), 4 a head; k and v a query head's where
    repeated
    attention of single operations             w (q + k + v + o), (4 + w) s a head: probabilities in fp32
    and w
    SwiGLU                                     4 w f: gate, its SiLU, up, product; 3 w f compiled
    GELU                                       2 w f: input and output
    head norms                                 their inputs

A linear layer that doesn't train keeps no input: it needs its weight alone. Under sequence parallelism
norms are cut by tp, and column-parallel layers keep their gathered input whole
(torch/distributed/tensor/parallel/style.py, 2.13). Verified by tests/real/test_eager_bytes.py on
transformers' and torch's own modules. Sources: torch derivatives.yaml; huggingface/transformers
src/transformers/models/llama/modeling_llama.py 5.24; huggingface/peft src/peft/tuners/lora/layer.py 0.21;
pytorch/torchtune torchtune/modules/rms_norm.py 0.4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from dslaunch.model import fused, state_space
from dslaunch.model.blocks import Attention, Block, Layered, blocks, divided
from dslaunch.model.params import alike, padded_vocab, trained_layers
from dslaunch.model.passes import Pass
from dslaunch.schema.components import Component, Decoder, Mlp, Other
from dslaunch.schema.layer import Lora

_FP32 = 4
_CHUNKS = 8
"""Of a chunked loss (torchtitan/components/loss.py, b5bcd76; torchtune's CEWithChunkedOutputLoss)."""
_NVFP4_LAYERS = 0.85
"""Share of layers that NVFP4 recipes convert, the first ones
(torchtitan/components/quantization/nvfp4.md)."""
_MASK = 1
"""Bytes of an element of a dropout mask."""
EVERY_SECOND_PRODUCT = "matmul"
ATTENTION_TOO = "attention"


def layer_bytes(component: Component, run: Pass, layer: int) -> float:
    """Bytes one layer keeps for one sample's backward pass; the whole of a component without layers."""
    if isinstance(component, Other | Mlp):
        return fused.layer_bytes(component, run, layer)
    shape = blocks(component)[layer]
    if run.recompute == "full":
        return run.tokens * run.width * shape.hidden * run.whole
    if run.recompute == "selective" and EVERY_SECOND_PRODUCT in run.software.recompute_modules:
        converted = int(_NVFP4_LAYERS * component.layers) if run.software.fp8 == "nvfp4" else 0
        return _products_bytes(shape, run, 1 - converted / component.layers)
    trains = layer in trained_layers(component)
    crossed = run.reads.cross_at(layer)
    attention = sum(_attention_bytes(each, run, trains, component.lora, crossed) for each in shape.attentions)
    return (
        attention
        + _state_space_bytes(shape, run, trains)
        + _branches_bytes(component, shape, run, trains)
        + _mlp_bytes(shape, run, trains, component.lora)
    )


def _products_bytes(layer: Block, run: Pass, share: float) -> float:
    """Selective checkpointing by operation: all but some outputs is made again.

    A layer keeps its input, the output of the first, third, ... matrix product in the order q, k, v, o,
    gate, up, down, and attention's output.
    Compiled, the last product's output is not kept: nothing reads it. NVFP4's products are none that are
    listed to be kept (torchao's autograd function), so that a layer converted to it makes them all again:
    `share` of the layers is not, and each is counted as their mean.
    Experts of a mixture are grouped products, which are kept. Source: pytorch/torchtitan
    torchtitan/parallelisms/parallelize_llama.py (9dec370), torchtitan/distributed/activation_checkpoint.py
    (b5bcd76); that the compiler drops the last one is measured.
    """
    w, attentions = run.width, layer.attentions
    outputs = [size for each in attentions for size in _projections(each, layer.hidden * run.whole, run)]
    if layer.mamba:
        outputs += [layer.mamba.projected / run.tp, layer.hidden * run.whole]
    width = divided(layer.ffn, run.tp)
    outputs += [width] * layer.halves * (layer.ffn > 0) + [layer.hidden * run.whole] * (layer.ffn > 0)
    if run.software.compiled:
        outputs = outputs[:-1]
    kept = share * sum(outputs[::2])
    core = sum(w * each.value_width(run.tp) + _FP32 * divided(each.heads, run.tp) for each in attentions)
    if ATTENTION_TOO in run.software.recompute_modules:
        core = 0
    return run.tokens * (w * (layer.hidden * run.whole + kept) + core) + _experts_bytes(layer, run)


def _state_space_bytes(layer: Block, run: Pass, trains: bool) -> float:
    """The projection's input and output, and the scan's output, from which gate and norm are made again."""
    if layer.mamba is None:
        return 0.0
    scan, last = state_space.kept(layer.mamba, run.tp)
    return run.tokens * run.width * (layer.hidden * trains + scan - last)


def _projections(attention: Attention, hidden: float, run: Pass) -> tuple[float, ...]:
    """Output widths of query, key, value and output products on one rank, in that order."""
    kv = attention.kv_width(run.tp) / 2
    return attention.query_width(run.tp), kv, kv, hidden


def _branches_bytes(component: Layered, layer: Block, run: Pass, trains: bool) -> float:
    """Norms of hidden width, and what scales and adaptive norms multiply."""
    branches = layer.branches
    norms = branches + (layer.norms > branches) * branches
    others = run.width * (branches * layer.layer_scale + _modulated(layer.modulation))
    return norms * _norm_bytes(component, run, trains) + run.tokens * layer.hidden * run.whole * others


def _norm_bytes(component: Layered, run: Pass, trains: bool) -> float:
    """What one norm of hidden width keeps."""
    w = run.width
    if _is_rms(component) and run.software.composed_norms:
        return run.tokens * component.hidden * run.whole * _FP32 * (1 + trains)
    each = (_FP32 + w * trains if w < _FP32 else w * (1 + trains)) if _upcasts(component, run) else w
    return run.tokens * component.hidden * run.whole * each


def _upcasts(component: Component, run: Pass) -> bool:
    single = run.software.upcast_norms or run.software.family == "transformers"
    return _is_rms(component) and single and not run.software.compiled


def _is_rms(component: Component) -> bool:
    return getattr(component, "norm", "layernorm") == "rmsnorm"


def _modulated(factors: int) -> int:
    """Tensors of hidden width that (shift, scale, gate) triples or (shift, scale) pairs multiply."""
    return factors // 3 * 2 if factors % 3 == 0 else factors // 2


def _attention_bytes(each: Attention, run: Pass, trains: bool, lora: Lora | None, crossed: int) -> float:
    """One sample's pass through an attention, from its norm's output to the output projection's input."""
    w, tokens = run.width, run.tokens
    keys = crossed if each.cross else tokens + run.reads.shared
    query, value, kv = each.query_width(run.tp), each.value_width(run.tp), each.kv_width(run.tp)
    copied = kv
    if run.software.repeated_kv or not run.software.flash_attention:
        copied = query + value
    targets = ("q",) if each.cross else ("q", "k", "v")
    inputs = tokens * each.hidden * _input_bytes(w, trains, lora, targets, "qkv")
    inputs += tokens * value * _adapter_bytes(w, lora, ("o",))
    latents = 2 * (each.mla.q_lora_rank + each.mla.kv_lora_rank) * run.whole if each.mla else 0.0
    normed = tokens * query + keys * kv / 2 if each.qk_norm else 0.0
    tensors = tokens * (query + value + latents) + keys * copied + normed
    return inputs + w * tensors + _core_bytes(each, run, keys)


def _core_bytes(each: Attention, run: Pass, keys: int) -> float:
    """Statistics of the softmax, or its probabilities; none of them where the core runs again."""
    if run.recompute == "selective":
        return 0.0
    heads = divided(each.heads, run.tp)
    if run.software.flash_attention:
        return _FP32 * run.tokens * heads
    return run.tokens * keys * heads * (_FP32 + (run.width if run.width < _FP32 else 0))


@lru_cache(maxsize=1024)
def backward_bytes(component: Component, run: Pass, first: int, number: int) -> tuple[float, float]:
    """Bytes beyond what is kept, of one sample, while the fullest of `number` layers from `first` on runs
    backward.

    Of its MLP, and then of its attention: all that the layer keeps without checkpointing, the gradient of its
    output and those of the MLP's two inner tensors; then, the MLP's branch given back, the gradients of q,
    k, v and the attention's output, and without a fused kernel those of its probabilities, in fp32 and in
    the pass's own type.
    """
    kinds = alike(component, run.reads, first, number)
    every = [_layer_backward(component, run, layer) for layer, _ in kinds]
    return max(mlp for mlp, _ in every), max(attention for _, attention in every)


def _layer_backward(component: Component, run: Pass, layer: int) -> tuple[float, float]:
    beyond = layer_bytes(component, replace(run, recompute="none"), layer) - layer_bytes(
        component, run, layer
    )
    if isinstance(component, Other | Mlp):
        return beyond, 0.0
    shape, w, tokens = blocks(component)[layer], run.width, run.tokens
    trains = layer in trained_layers(component)
    branch = _mlp_bytes(shape, run, trains, component.lora) + _norm_bytes(component, run, trains)
    inner = 0 if run.software.tiled_mlp else 2 * divided(shape.ffn, run.tp)
    widths = [2 * each.query_width(run.tp) + each.kv_width(run.tp) for each in shape.attentions]
    beyond += tokens * w * shape.hidden * run.whole
    attention = tokens * w * max(widths, default=0) + _score_gradients(shape, run)
    attention += tokens * state_space.backward_bytes(shape.mamba, run.tp, w) if shape.mamba else 0.0
    return beyond + tokens * w * inner, beyond - branch + attention


def _score_gradients(layer: Block, run: Pass) -> float:
    if run.software.flash_attention:
        return 0.0
    heads = sum(divided(each.heads, run.tp) for each in layer.attentions)
    return run.tokens * (run.tokens + run.reads.shared) * heads * (_FP32 + run.width)


def _mlp_bytes(layer: Block, run: Pass, trains: bool, lora: Lora | None) -> float:
    """The MLP that every token goes through, and the routed experts."""
    w, width = run.width, 0 if run.software.tiled_mlp else divided(layer.ffn, run.tp)
    first = ("gate", "up") if layer.gated else ("up",)
    inner = w * ((2 if run.software.compiled else 3) if layer.gated else 1)
    down = w * trains + _adapter_bytes(w, lora, ("down",))
    there = layer.ffn > 0 or layer.experts is not None
    read = layer.hidden * _input_bytes(w, trains, lora, first) * there
    return run.tokens * (read + width * (inner + down)) + _experts_bytes(layer, run)


def _input_bytes(
    w: int, trains: bool, lora: Lora | None, targets: tuple[str, ...], fused_target: str = ""
) -> float:
    """Bytes an element of the input that linear layers share."""
    if lora is not None and fused_target in lora.targets:
        return w + _MASK
    return w * trains + _adapter_bytes(w, lora, targets)


def _adapter_bytes(w: int, lora: Lora | None, targets: tuple[str, ...]) -> float:
    """Bytes an element of inputs of adapters: each has what its own dropout leaves, and the mask."""
    return 0.0 if lora is None else (w + _MASK) * sum(target in lora.targets for target in targets)


def _experts_bytes(layer: Block, run: Pass) -> float:
    """Routed experts of the fullest rank: dispatched token, inner widths, output; the router's fp32
    logits."""
    experts = layer.experts
    if experts is None:
        return 0.0
    inner = divided(experts.ffn, run.etp) * (layer.halves + 1)
    balance = fused.IMBALANCE if run.ep > 1 else 1.0
    routed = run.width * balance * experts.top_k * (2 * layer.expert_width + inner)
    return run.tokens * (routed + _FP32 * experts.count * run.whole)


def logits_bytes(component: Component, run: Pass) -> float:
    """Bytes of one sample's head and loss at their fullest; 0 without a vocabulary.

    Inputs of the final norm and of the head; and for each logit, w = 2 in bf16, by what cross-entropy is
    made of (aten/src/ATen/native/LossNLL.cpp, 2.13):
    - plain: log-probabilities, their gradient, the gradient of logits, each in fp32: 12. Under tensor
      parallelism the gradient takes one more (torch/distributed/tensor/parallel/loss.py, 2.13);
    - fused: 16-bit logits and their gradient: 2 w; fp32 logits, their gradient and that in 16 bits: 10;
    - chunked: the plain loss for one of 8 chunks, or 16-bit logits of all and the loss of one. Liger has
      as many chunks as vocab / hidden: one has as many logits as the input has elements
      (linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py, 0.5). The gradient of the
      input is made with the loss.
    """
    if not isinstance(component, Decoder):
        return 0.0
    norm = _final_norm_width(component, run)
    if run.software.loss == "chunked":
        norm += 2 * run.width
    once = norm * component.hidden + padded_vocab(component, _head_cut(run)) * _loss_width(run)
    return run.tokens * once * (1 + component.mtp_layers)


def kept_loss_bytes(component: Component, run: Pass) -> float:
    """Of what `logits_bytes` counts for a plain loss, bytes that stay until its backward pass where other
    micro-batches run between: log-probabilities, and under tensor parallelism their exponents too."""
    if not isinstance(component, Decoder):
        return 0.0
    kept = _FP32 * (2 if _head_cut(run) > 1 else 1)
    once = _final_norm_width(component, run) * component.hidden + padded_vocab(component, _head_cut(run)) * kept
    return run.tokens * once


def _final_norm_width(component: Decoder, run: Pass) -> float:
    """Bytes of hidden width: what the final norm keeps, and the head's input."""
    if _is_rms(component) and run.software.composed_norms:
        return 2 * _FP32 * run.whole + run.width
    return (run.width + (_FP32 if _upcasts(component, run) else 0)) * run.whole + run.width


def _head_cut(run: Pass) -> int:
    """Ranks that share the logits of a sample."""
    return 1 if run.software.gathered_logits else run.tp


def _loss_width(run: Pass) -> float:
    """Bytes a logit."""
    software, w = run.software, run.width
    own = w if software.half_loss else _FP32
    plain = own * (4 if _head_cut(run) > 1 else 3)
    if software.loss == "plain":
        return plain + _FP32 * software.logits_held
    if software.loss == "fused":
        return 2 * _FP32 + w if software.logits_upcast else 2 * w
    if software.logits_whole:
        return w + own / _CHUNKS
    return 0.0 if software.family == "transformers" else plain / _CHUNKS
