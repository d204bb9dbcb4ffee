"""Host memory of DeepSpeed's offload beside its states' own bytes: buffers, and what page-locked blocks waste.

PyTorch rounds a page-locked block up to a power of two, and keeps what was freed: CachingHostAllocator.h of 2.13
with its own pinned_max_round_threshold and pinned_max_cached_size. Adam's moments, and at ZeRO-3 the master
weights, are pageable. The moments come with the first step: setting up takes less than what stays. Sources:
deepspeed/runtime/zero/{stage_1_and_2,stage3,partition_parameters}.py, ops/adam/cpu_adam.py, runtime/zenflow/ and
runtime/superoffload/, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dslaunch.engines.base import WIDTH
from dslaunch.engines.deepspeed_buckets import NVME_IN_HOST, ZERO3_SUB_GROUP
from dslaunch.model import params as counts
from dslaunch.model.matrices import tensor_sizes
from dslaunch.plan import nvme
from dslaunch.plan.case import Case
from dslaunch.schema.components import Component

PIN = "zero_optimization.offload_optimizer.pin_memory"
WHY = "PyTorch rounds page-locked blocks up to powers of two"


def beside_states(case: Case, stage: int) -> float:
    """Bytes of a rank. What an engine has once is counted with the trunk where it holds the whole model."""
    if not case.engine.deepspeed or case.layout.offload == "none":
        return 0.0
    total = _by_parameter(case, stage)
    if case.is_trunk or case.engine.per_component:
        shard = _trained(case, stage) / case.layout.shard
        scratch = _scratch(case, shard)
        total += sum(_power_of_two(block) - block for block in _page_locked(case, shard))
        total += _power_of_two(scratch) if page_locks(case) else scratch
        total += _second_gradients(case, shard)
    return total


def page_locked(case: Case, stage: int) -> float:
    """Bytes of a rank that the system cannot swap out: blocks as PyTorch rounds them, and the buffers for NVMe."""
    if not case.engine.deepspeed or case.layout.offload == "none" or case.config.cluster.gpu.accelerator == "cpu":
        return 0.0
    total = _locked_by_parameter(case, stage) + nvme.host_bytes(case, stage)
    if case.is_trunk or case.engine.per_component:
        shard = _trained(case, stage) / case.layout.shard
        total += sum(map(_power_of_two, _page_locked(case, shard)))
        total += _power_of_two(_scratch(case, shard)) if page_locks(case) else 0.0
        if case.layout.offload == "nvme_params":  # which stand among its buffers
            total -= case.width * min(NVME_IN_HOST, shard)
    return total


def _locked_by_parameter(case: Case, stage: int) -> float:
    """Blocks of one parameter each: with offload_param those of frozen weights too."""
    if case.layout.zero < 3:
        return _by_parameter(case, stage) if page_locks(case) else 0.0
    own = _by_parameter(case, stage)
    held = case.counts(stage)
    return own + (case.width / case.layout.shard * (held.total - held.trained) if own else 0.0)


def wastes(case: Case) -> bool:
    """Whether the component's offloaded states are in page-locked blocks."""
    return case.engine.deepspeed and case.layout.offload.startswith("cpu") and page_locks(case)


def page_locks(case: Case, part: str = "offload_optimizer") -> bool:
    """Whether DeepSpeed is told to page-lock what it offloads."""
    section: Any = case.config.engine.extra.get("zero_optimization", {})
    own = section.get(part, {}).get("pin_memory", True)
    return case.config.cluster.gpu.accelerator != "cpu" and own is not False


def _trained(case: Case, stage: int) -> float:
    """Parameters that the engine's optimizer has on a rank before they are sharded."""
    own = case.counts(stage).trained
    if case.engine.per_component:
        return own
    others = (each for name, each in case.config.model.components.items() if name != case.name)
    return own + sum(map(counts.trainable, others)) / case.layout.tp


def _page_locked(case: Case, shard: float) -> Iterator[float]:
    """Page-locked blocks whose bytes stand in the ledger already (engines/deepspeed.py, plan/nvme.py).

    ZeRO-1 and -2: the fp32 weights, the new 16-bit ones on their way to the GPU, and the fp32 gradients. ZeRO-3:
    the gradients in the type that they are added up in, the fp32 ones by sub-group, and the weights, which are
    page-locked whatever the configuration says.
    """
    layout, width = case.layout, case.width
    if layout.offload.endswith("_params") and case.config.cluster.gpu.accelerator != "cpu":
        yield width * (min(NVME_IN_HOST, shard) if layout.offload == "nvme_params" else shard)
    if not page_locks(case):
        return
    if layout.zero < 3:
        yield from (4 * shard, width * shard, 4 * shard)
        return
    yield WIDTH[case.grad_accum_dtype] * shard
    if layout.offload.startswith("cpu"):
        whole, rest = divmod(shard, ZERO3_SUB_GROUP)
        yield from (4 * size for size in (*[ZERO3_SUB_GROUP] * int(whole), rest))


def one_gradient(case: Case) -> float:
    """Bytes of a buffer for the largest parameter's gradient: ZeRO-1 and -2 that offload have one on the GPU too
    (temp_grad_buffer_for_gpu_offload)."""
    every = [each for each in case.config.model.components.values() if counts.trainable(each)]
    of_engine = [case.component] if case.engine.per_component else every
    largest = max(min(max(_sizes(each)), counts.trainable(each)) for each in of_engine)
    return case.width * largest / case.layout.tp


def _scratch(case: Case, shard: float) -> float:
    """A buffer for one parameter's gradient; SuperOffload's process has one for a sub-group's."""
    if case.layout.zero < 3:
        return one_gradient(case)
    return 4 * min(ZERO3_SUB_GROUP, shard) if case.config.strategy.super_offload.enabled else 0.0


def _second_gradients(case: Case, shard: float) -> float:
    """ZenFlow's, which are filled while the CPU steps with the first; they are pageable."""
    zenflow = case.config.strategy.zenflow
    return 4 * shard if zenflow.enabled and zenflow.overlap_step else 0.0


def _by_parameter(case: Case, stage: int) -> float:
    """Blocks of one parameter each.

    ZeRO-1 and -2 keep gradients of earlier micro-batches in the host's memory, where they are added up in the
    model's own type. With offload_param each weight has a block before all go into one, and frozen ones for good.
    """
    layout, held, width = case.layout, case.counts(stage), case.width
    if layout.zero < 3:
        adds_up = layout.num_microbatches > 1 and WIDTH[case.grad_accum_dtype] == width
        rounded = _rounding(case.component, layout.tp, width) if page_locks(case) else 1.0
        return width * held.trained / layout.shard * rounded if adds_up else 0.0
    if layout.offload != "cpu_params" or not page_locks(case, "offload_param"):
        return 0.0
    rounded = _rounding(case.component, layout.tp * layout.shard, width)
    frozen = held.total - held.trained
    return width / layout.shard * (held.trained * rounded + frozen * (rounded - 1))


@lru_cache(maxsize=512)
def _rounding(component: Component, cut: int, width: int) -> float:
    """How many times its bytes a component takes, with a page-locked block for each parameter's piece."""
    sizes = [width * size / cut for size in _sizes(component)]
    return sum(map(_power_of_two, sizes)) / sum(sizes)


def _power_of_two(size: float) -> float:
    """The next one from a whole number of bytes on."""
    whole = -int(-size // 1)
    return float(1 << (whole - 1).bit_length()) if whole else 0.0


def _sizes(component: Component) -> tuple[int, ...]:
    """Elements of the component's tensors; taken for one where they are not known."""
    return tensor_sizes(component) or (counts.params(component),)
