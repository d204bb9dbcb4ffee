"""Bytes that one sample leaves for the backward pass, on one tensor-parallel rank: by whose layers run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from dslaunch.model import eager, megatron
from dslaunch.model.blocks import further_layers
from dslaunch.model.params import alike
from dslaunch.model.passes import Pass
from dslaunch.model.shapes import layers
from dslaunch.schema.components import Component, Decoder, Mlp, Other


@lru_cache(maxsize=16384)
def _by_sample(run: Pass) -> Pass:
    """A pass with the same bytes for a sample: of how many run together, only whether several do counts."""
    return replace(run, together=min(run.together, 2))


@lru_cache(maxsize=16384)
def _of_weights(run: Pass) -> Pass:
    """A pass with the same weights on a rank, whatever runs through them."""
    return Pass(1, run.tp, width=run.width, reads=run.reads, etp=run.etp)


def stage_bytes(component: Component, run: Pass, first: int, number: int) -> float:
    """Bytes that `number` layers from `first` on keep for one sample's backward pass.

    Full recompute may cover the first `recompute_layers` of them only.
    """
    return _stage_bytes(component, _by_sample(run), first, number)


@lru_cache(maxsize=4096)
def _stage_bytes(component: Component, run: Pass, first: int, number: int) -> float:
    limit = run.software.recompute_layers if run.recompute == "full" else None
    covered = number if limit is None else min(number, limit)
    plain = replace(run, recompute="none")
    kept = sum(
        times * layer_bytes(component, run, at) for at, times in alike(component, run.reads, first, covered)
    )
    rest = alike(component, run.reads, first + covered, number - covered)
    kept += sum(times * layer_bytes(component, plain, at) for at, times in rest)
    if isinstance(component, Decoder) and first + number == layers(component):
        parts = further_layers(component) if component.mtp_layers else ()
        kept += component.mtp_layers * sum(layer_bytes(component, run, at) for at in parts)
    return kept


def stage_working_bytes(component: Component, run: Pass, first: int, number: int) -> float:
    """What the backward pass of the largest of `number` layers from `first` on takes, for one sample."""
    return _stage_working_bytes(component, _by_sample(run), first, number)


@lru_cache(maxsize=4096)
def _stage_working_bytes(component: Component, run: Pass, first: int, number: int) -> float:
    return max(working_set_bytes(component, run, at) for at, _ in alike(component, run.reads, first, number))


@lru_cache(maxsize=16384)
def layer_bytes(component: Component, run: Pass, layer: int = 0) -> float:
    """Bytes one layer keeps for one sample's backward pass; the whole of a component without layers."""
    if run.software.family == "megatron" and not isinstance(component, Mlp | Other):
        return megatron.layer_bytes(component, run, layer)
    return eager.layer_bytes(component, run, layer)


@lru_cache(maxsize=16384)
def working_set_bytes(component: Component, run: Pass, layer: int = 0) -> float:
    """What one layer's backward pass takes on top of what is kept.

    With full recompute all that the layer keeps but its input comes back; so does what waits in host memory,
    of this layer and the next. Gradients stand beside it.
    """
    back = 0.0
    if run.recompute == "full":
        every = layer_bytes(component, replace(run, recompute="none"), layer)
        back = every - layer_bytes(component, run, layer)
    if run.software.family == "megatron" and not isinstance(component, Mlp | Other):
        back += megatron.backward_bytes(component, run, layer)
    if run.software.offloaded_modules:
        on_device = replace(run, software=replace(run.software, offloaded_modules=()))
        back += 2 * (layer_bytes(component, on_device, layer) - layer_bytes(component, run, layer))
    return back


def logits_bytes(component: Component, run: Pass) -> float:
    """Bytes the last stage keeps for one sample, head and loss; 0 for a component without a vocabulary."""
    if run.software.family == "megatron" and isinstance(component, Decoder):
        return megatron.head_bytes(component, run)
    return eager.logits_bytes(component, run)


def gradient_bytes(component: Component, run: Pass, first: int, number: int) -> tuple[float, float]:
    """Bytes of weights' gradients outside the buffers that the states' ledger counts.

    Returns:
        what stands for them all the time; what the embedding's takes once a micro-batch's other gradients are
        done.
    """
    if run.software.family != "megatron" or isinstance(component, Mlp | Other):
        return 0.0, 0.0
    standing = megatron.dummy_bytes(component, _of_weights(run), first, number) if run.software.fused_wgrad else 0
    table = megatron.table_bytes(component, run) if isinstance(component, Decoder) and first == 0 else 0
    return float(standing), float(table)
