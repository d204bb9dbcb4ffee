"""FLOPs of a step, as MFU and HFU count them, and which part of a backward pass runs."""

from __future__ import annotations

from dslaunch.model.flops import Flops, flops
from dslaunch.plan.case import Case
from dslaunch.plan.traffic import layer_range


def model_flops(case: Case) -> float:
    """FLOPs of a step of one component on all its ranks, no recompute."""
    stages = [_stage_flops(case, stage) for stage in range(case.layout.pp)]
    return sum(forward + backward for forward, backward in stages) * _samples_per_step(case)


def recompute_flops(case: Case) -> float:
    """FLOPs of a step that are done again, on all of the component's ranks."""
    return sum(_recompute_of(case, stage) for stage in range(case.layout.pp)) * _samples_per_step(case)


def backward_factor(case: Case) -> float:
    """2 where inputs and weights get gradients, 1 where only inputs do, 0 where nothing before trains.

    Where adapters train, all inputs need gradients, and of the weights those of the adapters alone; where
    some layers do, this holds for the layers from the lowest of them on, the frozen among them taken as
    trained.
    """
    if case.frozen:
        return 1.0 if case.passes_gradient else 0.0
    return 1.0 if case.component.lora else 2.0


def _stage_flops(case: Case, stage: int) -> tuple[float, float]:
    """(forward, backward) FLOPs of one pass through a stage, all tp ranks together."""
    parts = _component_flops(case)
    layers = layer_range(case, stage)
    ends = (parts.stem if stage == 0 else 0) + (parts.tail if stage == case.tail_stage else 0)
    reached = sum(parts.layers[layer] for layer in layers if layer >= case.lowest_layer)
    return float(sum(parts.layers[layer] for layer in layers) + ends), backward_factor(case) * (
        reached + ends
    )


def _recompute_of(case: Case, stage: int) -> float:
    """FLOPs of one pass through a stage that run again in the backward pass."""
    if backward_factor(case) == 0 or case.layout.recompute == "none":
        return 0.0
    parts = _component_flops(case)
    again = parts.attention_cores if case.layout.recompute == "selective" else parts.layers
    return float(sum(again[layer] for layer in layer_range(case, stage) if layer >= case.lowest_layer))


def _component_flops(case: Case) -> Flops:
    return flops(case.component, case.tokens * case.layout.cp, reads=case.reads)


def _samples_per_step(case: Case) -> int:
    return case.config.training.global_batch * case.component.passes
