"""What PyTorch's caching allocator holds beyond what is allocated at the fullest moment.

Found by division on published runs whose terms are all known, source by source, and rounded: freed blocks
are joined across sizes with expandable segments, else blocks of many sizes stay behind; where lengths
vary, most blocks that a step needs are new.
"""

from __future__ import annotations

from dslaunch.hardware.software import Software

_EXPANDABLE = 1.035
"""torchtitan's Llama 3 runs of 2024-12 and 2025-08, with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: 1.016
to 1.054."""
_SEGMENTS = 1.12
"""The same without it, on H200 and B200 in 2025-06 and 2026-08: 1.108 to 1.137."""
_ONE_STREAM = 1.02
"""QwenLM/Qwen's README, adapters on one A100: memory grows with the length as what is allocated does."""
_GENERATIONS = 2
"""ms-swift's benchmark of 2024-01 up to 2,048 tokens: the loss's tensors three times, their own included."""


def reserved_ratio(software: Software, streams: bool) -> float:
    """Reserved by allocated bytes of the computing stream.

    Args:
        streams: others hold tensors of this one, which are freed only when they are done (FSDP).
    """
    if software.expandable_segments:
        return _EXPANDABLE
    return _SEGMENTS if streams else _ONE_STREAM


def left_by_lengths(longest: float, tokens: int, usual: int) -> float:
    """Bytes of blocks that micro-batches of other lengths leave behind: twice what a usual one takes.

    Args:
        longest: bytes of the loss's tensors, which grow most with the length, of the longest sample.
        tokens: of that.
        usual: tokens of a usual sample; 0: as many.
    """
    return _GENERATIONS * longest * min(1.0, (usual or tokens) / tokens)
