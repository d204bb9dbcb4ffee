"""Mamba-2's scan on one tensor-parallel rank: FLOPs, traffic, what it keeps and what its backward pass takes.

The sequence is cut into chunks of Q tokens. For each head of P channels, with a state of N, and each group
(arXiv:2405.21060, section 6):

    within a chunk      C B^T of a group, then times the input     2 Q N a group, 2 Q P a head, for each token
    states of chunks    B^T times the input, and C times them      2 N P a head each, for each token

Kernels are those of state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py 2.2: convolution, cumulated time
steps, chunks' states (fp32), states passed on, C B^T, output; the backward pass makes all but the output again.
Only the projections' output, the scan's output before its gate, and what the norm reads and writes are kept
(mamba_split_conv1d_scan_combined; megatron/core/ssm/mamba_mixer.py, 0.16).
"""

from __future__ import annotations

from dslaunch.schema.layer import Mamba

_FP32 = 4
_KERNELS = 10
"""Forward: those above, the gated norm, two copies between token-first and sample-first order."""


def vectors(mamba: Mamba, tp: int) -> int:
    """Parameters on a rank beside the projections: convolution with its bias, norm, and three for each head."""
    return (mamba.convolved * (mamba.conv + 1) + mamba.inner + 3 * mamba.heads) // tp


def scan_flops(mamba: Mamba) -> int:
    """Forward FLOPs for each token, all heads and groups."""
    within = 2 * mamba.chunk * (mamba.groups * mamba.state + mamba.inner)
    return within + 4 * mamba.state * mamba.inner


def elements(mamba: Mamba, tp: int, width: int) -> tuple[float, float]:
    """(forward, backward) elements of `width` bytes that kernels read and write for each token on a rank.

    Forward: projections' output is copied (2), what is convolved read and written (2), read twice by the scan
    (2); states are written, passed on and read in fp32 (4); output, gate and norm (7 of the inner width).
    Backward: the same again but the norm's, then as much with the gradients beside it.
    """
    states = 4 * _FP32 / width * mamba.inner * mamba.state / mamba.chunk
    forward = 2 * mamba.projected + 4 * mamba.convolved + states
    norm = 7 * mamba.inner
    return (forward + norm) / tp, (3 * forward + 2 * norm) / tp


def kept(mamba: Mamba, tp: int) -> tuple[int, int]:
    """Elements for each token on a rank: (of the scan and the norm's input, of the last projection's input)."""
    return (mamba.projected + 2 * mamba.inner) // tp, mamba.inner // tp


def backward_bytes(mamba: Mamba, tp: int, width: int) -> float:
    """Bytes for each token that the backward pass takes at its fullest, on a rank.

    The convolution's output and its gradient, the gradients of the projections' output and of the scan's, and
    states with their gradients in fp32.
    """
    states = 2 * _FP32 * mamba.inner * mamba.state / mamba.chunk
    return (width * (2 * mamba.convolved + mamba.projected + 2 * mamba.inner) + states) / tp


def kernels() -> int:
    """Kernels that one layer's scan starts, forward."""
    return _KERNELS
