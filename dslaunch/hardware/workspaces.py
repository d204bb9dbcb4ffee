"""Memory that the libraries of matrix products hold for a whole run, inside what PyTorch counts as allocated:
workspaces, and weights in the type of the products."""

from __future__ import annotations

from dslaunch.hardware.efficiency import architecture
from dslaunch.hardware.software import Fp8, Software
from dslaunch.schema.cluster import Gpu

_MIB = 2**20
_LARGE = 32 * _MIB
"""Of cuBLAS from Hopper on, and with CUBLAS_WORKSPACE_CONFIG=:4096:8, which repeatable results ask for."""
_SMALL = 8 * _MIB + 128 * 1024
"""Of cuBLAS on older GPUs: :4096:2:16:8 (pytorch 2.9, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_TRANSFORMER_ENGINE = 4 * _MIB
"""On older GPUs (Transformer Engine 2.11, transformer_engine/pytorch/cpp_extensions/gemm.py)."""
_HANDLES = 2
"""cuBLAS has a handle for each thread that calls it: forward, and autograd's for the backward pass."""
_STREAMS = 4
"""Of Transformer Engine's grouped products, each with a workspace (the same file, get_num_cublas_streams)."""
_COPIES: dict[Fp8, float] = {
    "none": 0.0, "tensorwise": 2.0, "rowwise": 2.0, "blockwise": 2.0, "mxfp8": 2 * (1 + 1 / 32),
    "nvfp4": 2 * (1 / 2 + 1 / 16),
}  # fmt: skip
"""Bytes of a weight in the type of the products, for the forward and for the backward pass: as they are and
transposed, or scaled along rows and along columns."""


def weight_bytes(gpu: Gpu, scaling: Fp8) -> float:
    """Bytes of a layer's weight in the type of its products, which Transformer Engine makes once a step and keeps.

    GPUs whose products take either order of fp8 need no transposed copy where one scale is a tensor's: Blackwell's
    (Transformer Engine 2.11: transformer_engine/pytorch/module/linear.py, cache_name; csrc/quantizer.cpp,
    is_non_tn_fp8_gemm_supported; Megatron's layers hand on is_first_microbatch, megatron/core/extensions/
    transformer_engine.py 0.16).
    """
    if scaling == "tensorwise" and architecture(gpu) == "blackwell":
        return 1.0
    return _COPIES[scaling]


def library_bytes(gpu: Gpu, software: Software, routed: bool) -> int:
    """Bytes of cuBLAS's workspaces, and of Transformer Engine's under Megatron's layers.

    Args:
        routed: whether there are products of experts to group.
    """
    if gpu.accelerator == "cpu":
        return 0
    newer = architecture(gpu) in ("hopper", "blackwell")
    own = _HANDLES * (_LARGE if newer or software.deterministic else _SMALL)
    if software.family != "megatron":
        return own
    calls = 1 + _STREAMS * (software.grouped_products and routed)
    return own + calls * (_LARGE if newer else _TRANSFORMER_ENGINE)
