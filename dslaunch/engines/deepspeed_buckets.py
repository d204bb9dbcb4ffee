"""Sizes of DeepSpeed's communication buckets: rendered into the JSON, and counted in the ledger."""

from __future__ import annotations

MOST = 200_000_000
"""Elements: 0.4 GB in bf16, large enough to fill a network link, 0.4 of DeepSpeed's own 5e8 default."""


def reduce_bucket_elements(trainable: int) -> int:
    """`reduce_bucket_size` and `allgather_bucket_size` for a rank with so many trainable parameters."""
    return max(1, min(trainable, MOST))


def prefetch_elements(params: int) -> int:
    """`stage3_prefetch_bucket_size`: a tenth of the rank's parameters, 5e7 (the default) at most."""
    return max(1, min(params // 10, 50_000_000))


def persistence_elements(params: int) -> int:
    """`stage3_param_persistence_threshold`: norms and biases stay gathered; 1e5 (the default) at most."""
    return max(1, min(params // 1000, 100_000))


def live_elements(params: int) -> int:
    """`stage3_max_live_parameters`: gathered at one time."""
    return max(1, min(params, 500_000_000))


def gathered_elements(params: int) -> int:
    """Elements that ZeRO-3 holds gathered at its fullest moment, prefetch included."""
    return live_elements(params) + prefetch_elements(params)
