"""Seconds of what goes to host memory and comes back: optimizer states, weights, activations."""

from __future__ import annotations

from dataclasses import replace

from dslaunch.hardware.efficiency import Tables
from dslaunch.model.activations import stage_bytes
from dslaunch.plan import nvme
from dslaunch.plan.case import Case

_ADAM_BYTES = 28
"""Host memory traffic per parameter of an Adam step: master, moments read and written, gradient, new
weight."""
_HYBRID_BYTES = 8
"""What crosses PCIe for a parameter that Megatron's hybrid optimizer steps on the host: its gradient down and its
weight up, in fp32 each, since copies that do not block are converted on the GPU
(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, 0.16; aten/src/ATen/native/cuda/Copy.cu, 2.13)."""


def stepped(case: Case, stage: int) -> float:
    """Parameters that a rank's optimizer steps."""
    held, layout = case.counts(stage), case.layout
    sharded, routed = (layout.shard, layout.expert_shard) if layout.zero else (1, 1)
    return (held.trained - held.trained_experts) / sharded + held.trained_experts / routed


def states_s(case: Case, stage: int, tables: Tables) -> float:
    """Once a step: gradients down, weights up over PCIe, Adam in host memory, and what goes to NVMe and back."""
    if case.frozen:
        return 0.0
    if case.layout.offload == "none":
        return _hybrid_s(case, stage, tables)
    shard = case.counts(stage).trained / case.layout.shard
    gathers = 2 * case.layout.num_microbatches if case.layout.offload.endswith("_params") else 1
    moved = shard * (4 + case.width * gathers) / _pcie(case, tables)
    adam = shard * _ADAM_BYTES / (tables.host_adam_gb_per_s * 1e9)
    return moved + adam + nvme.seconds(case, stage)


def activations_s(case: Case, stage: int, tables: Tables) -> float:
    """One way, of a micro-batch: what a stage's layers keep for the backward pass in host memory."""
    software, layout, component = case.software, case.layout, case.component
    if not (software.offloaded_activations or software.offloaded_layers or software.offloaded_modules):
        return 0.0
    first, number = case.first_layer(stage), layout.layers_per_stage[stage]
    kept = stage_bytes(component, case.run, first, number)
    if software.offloaded_modules:
        whole = replace(case.run, software=replace(software, offloaded_modules=()))
        kept = stage_bytes(component, whole, first, number) - kept
    elif software.offloaded_layers:
        kept *= min(1.0, software.offloaded_layers / sum(layout.layers_per_stage))
    return case.samples * kept / _pcie(case, tables)


def _hybrid_s(case: Case, stage: int, tables: Tables) -> float:
    """Of the share that Megatron's hybrid optimizer steps on the host: copies and step one after the other, or
    beside one another, a parameter at a time."""
    params = stepped(case, stage) * case.software.offloaded_states
    moved = params * _HYBRID_BYTES / _pcie(case, tables)
    adam = params * _ADAM_BYTES / (tables.host_adam_gb_per_s * 1e9)
    return max(moved, adam) if case.software.overlapped_step else moved + adam


def _pcie(case: Case, tables: Tables) -> float:
    """Bytes a second."""
    return case.config.cluster.gpu.pcie_gb_per_s * 1e9 * tables.pcie
