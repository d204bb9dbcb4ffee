"""Sizes of DeepSpeed's communication buckets, in elements: rendered into the JSON, and counted in the ledger."""

from __future__ import annotations

BUCKET = 200_000_000
"""Largest gradient bucket: 400 MB in bf16 keep a link busy; overlap_comm holds two of them."""
PREFETCH = 50_000_000
"""ZeRO-3: parameters fetched ahead (DeepSpeed's default, written out)."""
PERSISTENT = 100_000
"""ZeRO-3: parameters up to this size stay whole on every rank (DeepSpeed's default, written out)."""
LIVE = 1_000_000_000
"""ZeRO-3: parameters gathered at one time (DeepSpeed's default, written out)."""


def bucket_elements(trainable: int) -> int:
    """`reduce_bucket_size` and `allgather_bucket_size` of an engine with so many trainable parameters on a rank."""
    return max(1, min(trainable, BUCKET))


def gathered_elements(params: int) -> int:
    """Elements that ZeRO-3 holds gathered at its fullest moment.

    A parameter stays gathered while its next use is nearer than max_reuse_distance (1e9 elements), up to
    max_live_parameters; the prefetched ones come on top (deepspeed/runtime/zero/
    partitioned_param_coordinator.py, 0.19.8).
    """
    return min(params, LIVE + PREFETCH)
