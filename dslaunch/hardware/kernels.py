"""Seconds of single kernels on one GPU: matrix products by shape, attention cores, memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dslaunch.hardware.efficiency import Tables, architecture
from dslaunch.hardware.software import Fp8, Software
from dslaunch.schema.cluster import Gpu

_MULTIPROCESSORS = {
    "volta": 80, "ampere": 108, "ga102": 84, "ada": 142, "hopper": 132, "blackwell": 148, "cdna3": 304,
    "cdna4": 256,
}  # fmt: skip
"""Of the card with most of them that is sold, from the vendors' architecture white papers."""
_TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.82), (64, 64, 0.62))
"""Output tiles of a matrix product, and the speed of each by that of the largest."""
_PROLOGUE = 256
"""Inner width that filling and draining a tile's pipeline costs."""
_BATCHED_PROLOGUE = 128
"""The same of many small products in one kernel, whose tiles share a multiprocessor and hide each other's."""
_SPLITS = (1, 2, 4, 8)
"""Parts into which a long inner width is cut where there are too few tiles."""
_SHORT = 256
"""Tokens at which fused attention reaches half of its speed."""
_NARROW = {"none": 1.0, "tensorwise": 1.0, "mxfp8": 1.0, "blockwise": 0.85, "rowwise": 0.6, "nvfp4": 0.75}
"""Products by their scaling, against the share of the peak that fp8 with one scale for a tensor reaches. Of fp4,
scales of 16 elements and Hadamard transforms take a part; rowwise products were no faster than bf16's in
pytorch/torchtitan: benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md."""
_ALIGNED, _UNALIGNED = 64, 0.72
"""Elements that a width has to be a multiple of for the fastest kernels, and the speed of others: NVIDIA's
guide to matrix multiplication names 64 for fp16 on the A100; BLOOM's trials reached 94 TFLOPS with a hidden
width of 14400 in 8 parts, 120 with 13824 (bigscience-workshop/bigscience:
train/tr11-176B-ml/chronicles.md)."""


@dataclass(frozen=True)
class Gemm:
    """`count` products (m x k) (k x n)."""

    m: int
    n: int
    k: int
    count: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Device:
    """The speeds of one GPU in one precision: what seconds are computed with."""

    peak: float
    """FLOP/s in large products of the working precision."""
    narrow: float
    """FLOP/s in large products of fp8 or fp4."""
    attention: float
    """FLOP/s in fused attention."""
    memory: float
    """Bytes/s."""
    multiprocessors: int

    def gemm(self, product: Gemm, width: int, narrow: bool = False) -> float:
        """Seconds of a product whose elements have `width` bytes; memory-bound where it is thin."""
        m, n, k = product.m, product.n, product.k
        used = tiled(m, n, k, self.multiprocessors)
        busy = product.flops / ((self.narrow if narrow else self.peak) * used)
        moved = product.count * width * (m * k + k * n + m * n)
        return max(busy, moved / self.memory)

    def batched(self, product: Gemm, width: int) -> float:
        """The same for the batched products of unfused attention, whose rows lie a whole hidden width apart."""
        m, n, k = product.m, product.n, product.k
        used = _tiled(m, n, k, self.multiprocessors, _BATCHED_PROLOGUE)
        moved = product.count * width * (m * k + k * n + m * n)
        return max(product.flops / (self.peak * used), moved / self.memory)

    def core(self, flops: float, head: int, keys: int) -> float:
        """Seconds of fused attention: narrow heads and short sequences are slower.

        Args:
            head: width of a head.
            keys: keys that a query could see.
        """
        return flops / (self.attention * _of_head(head) * keys / (keys + _SHORT)) if flops else 0.0


def _of_head(head: int) -> float:
    """Speed at heads of 64 is two thirds to three quarters of that at 128 (arXiv:2307.08691, figure 4);
    widths between are padded to the next power of 2."""
    padded = 1 << (head - 1).bit_length()
    return head / padded * float(min(1.0, padded / 128) ** 0.45)


def tiled(m: int, n: int, k: int, multiprocessors: int) -> float:
    """Share of a large product's speed that the shape leaves: whole tiles, whole waves of them, short inner
    widths."""
    best = _tiled(m, n, k, multiprocessors, _PROLOGUE)
    return best if n % _ALIGNED == 0 and k % _ALIGNED == 0 else best * _UNALIGNED


@lru_cache(maxsize=65536)
def _tiled(m: int, n: int, k: int, multiprocessors: int, prologue: int) -> float:
    best = 0.0
    for height, width, speed in _TILES:
        tiles = -(-m // height) * -(-n // width)
        filled = m * n / (tiles * height * width)
        for parts in _SPLITS:
            inner = k / parts
            waves = -(-tiles * parts // multiprocessors)
            busy = tiles * parts / (waves * multiprocessors)
            best = max(best, speed * filled * busy * inner / (inner + prologue))
    return best


def device(gpu: Gpu, tables: Tables, precision: str, software: Software) -> Device:
    """The speeds of a GPU in `precision`, under a family's kernels."""
    rates = tables.gpu(gpu)
    return Device(
        peak=_peak(gpu, precision) * 1e12 * rates.matrix,
        narrow=_narrow_peak(gpu, software.fp8) * 1e12 * rates.narrow * _NARROW[software.fp8],
        attention=_peak(gpu, precision)
        * 1e12
        * (rates.own_attention if software.own_attention else rates.attention),
        memory=gpu.hbm_gb_per_s * 1e9 * rates.hbm,
        multiprocessors=_MULTIPROCESSORS[architecture(gpu)],
    )


def _peak(gpu: Gpu, precision: str) -> float:
    peaks: dict[str, float] = {str(kind): peak for kind, peak in gpu.peak_tflops.items()}
    return peaks.get(precision, peaks.get("fp32", 1.0))


def _narrow_peak(gpu: Gpu, scaling: Fp8) -> float:
    """Of fp4 where that is what the products are in and the hardware has it, else of fp8."""
    of_fp8 = gpu.peak_tflops.get("fp8", _peak(gpu, "bf16"))
    return gpu.peak_tflops.get("fp4", of_fp8) if scaling == "nvfp4" else of_fp8
