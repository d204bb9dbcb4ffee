"""How a framework keeps and moves tensors: what the ledgers depend on beside layout and hardware.

A family is a set of kernels and habits, not an engine: DeepSpeed under Megatron's layers keeps activations as
Megatron does, under Hugging Face's layers as they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["megatron", "transformers", "torch"]
"""Whose layers run: Megatron's (fused, Transformer Engine where it is installed), Hugging Face's eager modules,
or plain PyTorch modules of the torchtitan and llm-foundry kind."""
Fp8 = Literal["none", "tensorwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Software:
    """Habits of the program that runs a component."""

    family: Family
    flash_attention: bool = True
    """Attention keeps no s^2 tensors."""
    fp8: Fp8 = "none"
    """Data type of the matrix products' inputs; weights and activations stay in training.precision."""
    loss: Literal["plain", "fused", "chunked"] = "plain"
    """Logits and loss as single operations in fp32, in one kernel over bf16 logits, or by pieces of the sequence."""
    recompute_layers: int | None = None
    """Layers of a stage that full recompute covers; None: all."""
    recompute_modules: tuple[str, ...] = ()
    """What selective recompute covers, in Megatron's words; empty: attention's core."""
    half_states: bool = False
    """Weights, gradients and moments are all in 16 bits: no fp32 master (torchtune's bf16 recipes)."""


OF_ENGINE: dict[str, Software] = {
    "deepspeed": Software("transformers"),
    "torch": Software("transformers"),
    "megatron": Software("megatron"),
    "megatron_deepspeed": Software("megatron"),
    "megatron_mimo": Software("megatron"),
    "native": Software("torch"),
}
"""What runs under an engine where nobody says otherwise."""
