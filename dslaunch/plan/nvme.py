"""What states on NVMe take: space in a node, pinned buffers on its host, and time (ZeRO-Infinity).

Sources: arXiv:2104.07857; deepspeed/runtime/swap_tensor/{optimizer_utils,partitioned_param_swapper}.py and
runtime/zero/stage3.py, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.deepspeed_buckets import (
    NVME_IN_HOST,
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAM_BUFFERS,
    NVME_SUB_GROUP,
    param_buffer_elements,
)
from dslaunch.model.matrices import tensor_sizes
from dslaunch.plan.case import Case
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Component

GIB = 2**30
_OPTIMIZER_BYTES = 32
"""Per trained parameter and step: the fp32 gradient written (4), states and gradient read (16), states written."""


def uses_nvme(case: Case) -> bool:
    """Whether the component's states, or its weights too, are in files."""
    return case.layout.offload.startswith("nvme")


def gib_per_node(cases: Mapping[str, Case], slots: int) -> float:
    """NVMe space on the fullest node: each rank keeps its own pieces in files of its own."""
    return slots * sum(
        max(_bytes(case, stage) for stage in range(case.layout.pp)) / GIB for case in cases.values()
    )


def _bytes(case: Case, stage: int) -> float:
    """In files of one rank: states of what trains, and frozen weights where parameters are there too."""
    held = case.counts(stage)
    frozen = held.total - held.trained if case.layout.offload == "nvme_params" else 0
    return held.trained * case.states.nvme + frozen * case.width / case.layout.shard


def host_bytes(case: Case, stage: int) -> float:
    """Pinned buffers of one rank, and the parameters that stay in host memory.

    One engine holds the whole model and has one set of parameter buffers, counted with the trunk.
    """
    if not uses_nvme(case):
        return 0.0
    shard = case.counts(stage).trained / case.layout.shard
    buffers = NVME_OPTIMIZER_BUFFERS * 4 * min(NVME_SUB_GROUP, shard)
    if case.layout.offload == "nvme":
        return buffers
    kept = min(NVME_IN_HOST, shard) * case.width
    if not case.is_trunk:
        return buffers + kept
    pinned = NVME_PARAM_BUFFERS * param_buffer(case.config, case.layout.shard) * case.width
    return buffers + kept + pinned


def param_buffer(config: RunConfig, shard: int) -> int:
    """Elements of one buffer for parameters, where ZeRO-3 cuts over `shard` ranks."""
    largest = max(map(largest_parameter, config.model.components.values()))
    return param_buffer_elements(largest, shard)


def largest_parameter(component: Component) -> int:
    """Elements of the largest tensor; 0 where the component's parts are not known."""
    return max(tensor_sizes(component), default=0)


def seconds(case: Case, stage: int) -> float:
    """One step's reads and writes of a rank, at its share of the node's bandwidth; nothing hides them."""
    if not uses_nvme(case):
        return 0.0
    cluster, layout = case.config.cluster, case.layout
    shard = case.counts(stage).trained / layout.shard
    weights = case.width * (1 + 2 * layout.num_microbatches) if layout.offload == "nvme_params" else 0
    return shard * (_OPTIMIZER_BYTES + weights) * cluster.slots / (cluster.node.nvme_gb_per_s * 1e9)
