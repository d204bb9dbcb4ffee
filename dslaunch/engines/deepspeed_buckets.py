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
ZERO3_SUB_GROUP = 1_000_000_000
"""Elements of a rank's shard that the optimizer steps over at a time (DeepSpeed's default of sub_group_size)."""
NVME_SUB_GROUP = 100_000_000
"""Elements of a rank's shard that the optimizer takes from NVMe at a time."""
NVME_OPTIMIZER_BUFFERS = 4
"""Pinned fp32 buffers of that size on the host: master weights, gradient and two moments (DeepSpeed's default)."""
NVME_PARAM_BUFFERS = 5
"""Pinned buffers for parameters (DeepSpeed's default, written out)."""
NVME_PARAM_BUFFER = 100_000_000
"""Elements of such a buffer at least (DeepSpeed's default)."""
NVME_IN_HOST = 1_000_000_000
"""Elements of a rank's parameters that stay in host memory (DeepSpeed's default, written out)."""


def bucket_elements(trainable: int) -> int:
    """`reduce_bucket_size` and `allgather_bucket_size` of an engine with so many trained parameters on a rank."""
    return max(1, min(trainable, BUCKET))


def gathered_elements(params: int) -> int:
    """Elements that ZeRO-3 holds gathered at its fullest moment.

    A parameter stays gathered while its next use is nearer than max_reuse_distance (1e9 elements), up to
    max_live_parameters; the prefetched ones come on top (deepspeed/runtime/zero/
    partitioned_param_coordinator.py, 0.19.8).
    """
    return min(params, LIVE + PREFETCH)


def param_buffer_elements(largest: int, shard: int) -> int:
    """`offload_param.buffer_size`: a rank's piece of the model's largest parameter must fit
    (runtime/swap_tensor/partitioned_param_swapper.py asserts it, 0.19.8)."""
    return max(NVME_PARAM_BUFFER, -(-largest // shard))
