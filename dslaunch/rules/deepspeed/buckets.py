"""Sizes of ZeRO's buffers against memory and against latency."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit

_BUFFERS = (
    "deepspeed/runtime/zero/stage_1_and_2.py setup_buckets, runtime/zero/stage3.py 0.19.8; DeepSpeed#6351"
)
_LARGE_GIB = 4.0
"""Above what the default takes at most: 2 buckets * 5e8 elements * 4 bytes = 3.7 GiB, in fp32 with overlap."""
_SMALL = 1_000_000
"""Elements below which a message costs its latency more than its bytes; a layer of hidden 1024 has as many."""
_WHOLE = 10_000_000
"""Elements: a threshold above it keeps whole layers, not only norms and biases."""


@config_rule("zero.buckets", severity="memory", evidence=_BUFFERS)
def buckets(config: Config) -> Iterator[Hit]:
    """Buckets that take gigabytes of each GPU, or that are too small to be worth a message."""
    reduce = f"{ZERO}.reduce_bucket_size"
    size = config.number(reduce)
    if config.plan is None and config.sharded and size is not None and 0 < size < _SMALL:
        message = f"reduce_bucket_size {size:g} elements: each message is small, and latency decides."
        yield config.hit(reduce, message, "Use hidden * hidden or more.", severity="slow")
    if config.stage not in (1, 2) or size is None or config.off(f"{ZERO}.contiguous_gradients"):
        return
    copies = 2 if config.on(f"{ZERO}.overlap_comm") else 1
    width = 4 if config.precision == "fp32" and not config.precision_open else 2
    gib = copies * size * width / 2**30
    if gib > _LARGE_GIB:
        twice = " (two reduce buckets, for overlap_comm)" if copies == 2 else ""
        message = f"the buckets take {gib:.1f} GiB of each GPU{twice}."
        yield config.hit(reduce, message, "Use 1e8 to 5e8 elements.")


@config_rule("zero.overlap", severity="info", evidence=_BUFFERS)
def overlap(config: Config) -> Iterator[Hit]:
    """overlap_comm left out at stage 1 or 2 on several nodes: it is off there, and on at stage 3."""
    key = f"{ZERO}.overlap_comm"
    several = config.plan is None and (config.settings.nodes or 1) > 1 and config.stages == 1
    if several and config.stage in (1, 2) and not config.has(key):
        message = (
            f"overlap_comm isn't given, and is off at stage {config.stage}: gradients are reduced over "
            f"{config.settings.nodes} nodes after the backward pass, not during it."
        )
        yield config.hit(key, message, "Write true, or false if that is meant.")


@config_rule("zero.thresholds", severity="memory", evidence=_BUFFERS)
def thresholds(config: Config) -> Iterator[Hit]:
    """Thresholds of ZeRO-3 that keep whole layers on each GPU, or none at all."""
    if config.stage != 3:
        return
    for name in ("stage3_param_persistence_threshold", "param_persistence_threshold"):
        size = config.number(f"{ZERO}.{name}")
        if size is not None and size > _WHOLE:
            message = f"{name} {size:g}: parameters of up to as many elements are never partitioned."
            yield config.hit(f"{ZERO}.{name}", message, "Use about 10 * hidden.")
    for name in ("stage3_max_live_parameters", "max_live_parameters"):
        size = config.number(f"{ZERO}.{name}")
        if size is not None and size < _SMALL:
            message = f"{name} {size:g}: weights are released and gathered again all the time."
            yield config.hit(f"{ZERO}.{name}", message, "Use about 1e9.", severity="slow")
    group, nvme = config.number(f"{ZERO}.sub_group_size"), config.offload("optimizer") == "nvme"
    if group is not None and nvme and group > 1e9:
        message = f"sub_group_size {group:g} with states on NVMe: as many elements are brought in at once."
        yield config.hit(f"{ZERO}.sub_group_size", message, "Use 1e8 to 1e9.")
