"""How a framework keeps and moves tensors: what the ledgers depend on beside layout and hardware.

A family is a set of kernels and habits, not an engine: DeepSpeed under Megatron's layers keeps activations as
Megatron does, under Hugging Face's layers as they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["megatron", "transformers", "torch"]
"""Whose layers run: Megatron's (fused, Transformer Engine where it is installed), Hugging Face's eager
modules, or plain PyTorch modules of the torchtitan and llm-foundry kind."""
Optimizer = Literal["adamw", "adamw8bit", "paged_adamw8bit"]
"""Which moments are kept: in the states' own type, in 8 bits with a scale for each 256, or those on the
host."""
Fp8 = Literal["none", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Software:
    """Habits of the program that runs a component."""

    family: Family
    flash_attention: bool = True
    """Attention keeps no s^2 tensors."""
    fp8: Fp8 = "none"
    """Data type of the matrix products' inputs; weights and activations stay in training.precision."""
    loss: Literal["plain", "compiled", "fused", "chunked"] = "plain"
    """Logits and loss as single operations in fp32, the same joined by the compiler, in one kernel over
    16-bit logits, or by pieces of the tokens."""
    recompute_layers: int | None = None
    """Layers of a stage that full recompute covers; None: all."""
    recompute_modules: tuple[str, ...] = ()
    """What selective recompute covers, in Megatron's words; empty: attention's core."""
    dropout: bool = False
    """Each branch's output and attention's weights go through dropout, whose masks are kept."""
    fused_wgrad: bool = True
    """Products add weights' gradients to the main ones themselves (Megatron's gradient accumulation
    fusion)."""
    alltoall_context: bool = False
    """Context parallelism exchanges heads for tokens around attention; otherwise keys and values go round."""
    offloaded_layers: int = 0
    """Layers whose kept tensors wait in host memory (Megatron's cpu_offloading_num_layers)."""
    offloaded_modules: tuple[str, ...] = ()
    """Modules whose kept tensors wait in host memory, in Megatron's words."""
    half_moments: bool = False
    """The optimizer's two moments are in 16 bits."""
    wide_layers: tuple[int, int] = (0, 0)
    """Layers at the model's start and at its end whose products, and weights, stay in the run's own type
    beside those in fp8 (--first-last-layers-bf16; megatron/core/fp8_utils.py, is_first_last_bf16_layer,
    0.16.1)."""
    narrow_weights: bool = False
    """Layers have their matrices in the type of their products alone (Megatron's fp8_param_gather)."""
    offloaded_states: float = 0.0
    """Share of a rank's optimizer states that is in host memory, where they are stepped too (Megatron's
    HybridDeviceOptimizer)."""
    overlapped_step: bool = False
    """What goes to the host and back for that runs beside it (--overlap-cpu-optimizer-d2h-h2d)."""
    balanced_routing: bool = False
    """Tokens are dealt to experts evenly, whatever the router says."""
    known_counts: bool = False
    """No counts of tokens travel before the tokens do: an expert takes a fixed number, or a rank gathers all."""
    grouped_products: bool = False
    """Products of all experts of a rank run side by side, each stream with a workspace of its own."""
    fused_experts: bool = False
    """Both products of a routed expert, its activation and their casts to fp8 are one kernel."""
    deterministic: bool = False
    """Matrix products have the workspaces that repeatable results need."""
    half_states: bool = False
    """Weights, gradients and moments are all in 16 bits: no fp32 master (torchtune's bf16 recipes)."""
    half_gradients: bool = False
    """Gradients are reduced in 16 bits, whatever they are accumulated in."""
    compiled: bool = False
    """torch.compile joins kernels that compute little."""
    upcast_norms: bool = False
    """RMSNorm is single operations on a copy in fp32, not one kernel."""
    composed_norms: bool = False
    """torch's own RMSNorm is single operations in fp32, the product with its weight among them: on CPUs
    (aten/src/ATen/native/layer_norm.cpp, rms_norm_composite, 2.13)."""
    repeated_kv: bool = False
    """Keys and values are copied for each query head before attention."""
    logits_upcast: bool = False
    """The model hands its logits on in fp32, beside the loss."""
    logits_held: bool = False
    """The program holds the model's fp32 logits until the backward pass is done."""
    logits_whole: bool = False
    """A chunked loss finds the logits of all chunks made already."""
    gathered_logits: bool = False
    """Each rank of a tp group has the logits of the whole vocabulary: the head gathers them (DeepSpeed's AutoTP,
    module_inject/auto_tp.py, gather_output, 0.19.8; transformers' colwise_gather_output)."""
    half_loss: bool = False
    """Cross-entropy's own tensors are in 16 bits, as logits are: no autocast, no copy in fp32."""
    tiled_mlp: bool = False
    """The MLP runs by pieces of the sequence, forward and backward (DeepSpeed's TiledMLP)."""
    optimizer: Optimizer = "adamw"
    foreach_step: bool = False
    """The optimizer's step makes temporary tensors for all parameters at once, not one kernel's worth."""
    step_in_backward: bool = False
    """Each parameter is updated, and its gradient freed, as soon as that is made."""
    offloaded_activations: bool = False
    """What checkpointing keeps waits in host memory."""
    joined_ends: bool = False
    """FSDP gathers embedding and head together, before the first layer, and keeps them until the step
    ends."""
    whole_gradients: bool = False
    """FSDP reduces gradients behind a step's last micro-batch alone (no_sync, set_requires_gradient_sync):
    until then each rank adds up those of all its parameters."""
    expandable_segments: bool = True
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: freed memory is joined across sizes."""
    naive_split: bool = False
    """Stages run one after the other, a micro-batch at a time (transformers' device_map)."""
    varying_lengths: bool = False
    """Micro-batches are as long as their longest sample, so that freed blocks seldom fit the next ones."""
    usual_tokens: int = 0
    """Tokens of a usual sample where lengths vary; 0: as many as the longest."""
    overlap_tp: bool = False
    """Collectives of tensor parallelism run beside the products that need them (Transformer Engine's user
    buffers, PyTorch's asynchronous TP)."""
    dequantising: float = 5.0
    """Bytes that unpacking a weight of 4 bits moves, each time that its matrix is used."""
    overlap_ep: bool = False
    """Tokens travel to their experts beside the computation of another micro-batch."""
    own_attention: bool = False
    """Fused attention by kernels written for the GPU's architecture (cuDNN's in Transformer Engine)."""
    graphs: bool = False
    """Kernels are started by CUDA graphs, most of them without the host."""
    dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens reach their experts: once for each expert, or once for each node that has some of them."""

    def __hash__(self) -> int:
        """Of a few fields: it is part of the keys of what is reckoned once, and looked up often."""
        return hash((self.family, self.fp8, self.loss, self.flash_attention, self.dispatcher, self.compiled))


_SCALINGS: dict[str, Fp8] = {"blockwise": "blockwise", "mxfp8": "mxfp8"}
"""Of Megatron's --fp8-recipe; delayed, the default, and tensorwise have one scale for a tensor."""


@dataclass(frozen=True)
class Flagged:
    """What Megatron's flags change: fields of `Software`."""

    fp8: Fp8 = "none"
    wide_layers: tuple[int, int] = (0, 0)
    narrow_weights: bool = False
    offloaded_states: float = 0.0
    overlapped_step: bool = False
    half_moments: bool = False
    offloaded_layers: int = 0
    offloaded_modules: tuple[str, ...] = ()


def flagged(engine: str, flags: Mapping[str, Any]) -> Flagged:
    """The same by engine.extra: Megatron's flags without their dashes.

    Source: NVIDIA/Megatron-LM:megatron/training/arguments.py, core_v0.12.0 to core_v0.19.0.
    """
    if engine != "megatron":
        return Flagged()
    share = flags.get("optimizer-offload-fraction", 1.0) if flags.get("optimizer-cpu-offload") else 0.0
    return Flagged(
        narrow_products(engine, flags),
        _wide_layers(flags),
        bool(flags.get("fp8-param-gather")),
        float(share) if isinstance(share, int | float) else 0.0,
        bool(flags.get("overlap-cpu-optimizer-d2h-h2d")),
        all(flags.get(name) in ("bf16", "fp16") for name in ("exp-avg-dtype", "exp-avg-sq-dtype")),
        _whole(flags.get("cpu-offloading-num-layers")),
        _words(flags.get("offload-modules")) if flags.get("fine-grained-activation-offloading") else (),
    )


def _wide_layers(flags: Mapping[str, Any]) -> tuple[int, int]:
    """One at each end unless told otherwise."""
    if not flags.get("first-last-layers-bf16"):
        return (0, 0)
    return (
        _whole(flags.get("num-layers-at-start-in-bf16", 1)),
        _whole(flags.get("num-layers-at-end-in-bf16", 1)),
    )


def _whole(value: Any) -> int:
    """Of a flag; 0 where it has another value, which Megatron's parser refuses."""
    return value if isinstance(value, int) else 0


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def narrow_products(engine: str, flags: Mapping[str, Any]) -> Fp8:
    """What the matrix products are in, by engine.extra: Megatron's flags without their dashes.

    Source: NVIDIA/Megatron-LM:megatron/training/arguments.py, core_v0.12.0 to core_v0.19.0.
    """
    if engine != "megatron":
        return "none"
    if flags.get("fp4-format"):
        return "nvfp4"
    if flags.get("fp8-format"):
        return _SCALINGS.get(str(flags.get("fp8-recipe")), "tensorwise")
    return "none"


PLAIN = Software("torch")
OF_ENGINE: dict[str, Software] = {
    "deepspeed": Software("transformers", gathered_logits=True),
    "torch": Software("transformers", gathered_logits=True),
    "megatron": Software("megatron", loss="compiled", grouped_products=True, own_attention=True),
    "megatron_deepspeed": Software("megatron", own_attention=True),
    "megatron_mimo": Software("megatron", own_attention=True),
    "native": Software("torch"),
}
"""What runs under an engine where nobody says otherwise."""
