"""The time ledger: seconds of one optimizer step, by component, stage and term. The dataloader is not in it.

A first estimate: shares of peak figures by `hardware.efficiency`, slowest stage as the pipeline's clock,
exposed communication where nothing hides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dslaunch.engines.base import WIDTH
from dslaunch.engines.deepspeed_modes import hpz
from dslaunch.hardware.efficiency import Efficiency
from dslaunch.hardware.topology import group_link
from dslaunch.model.flops import Flops, flops
from dslaunch.plan import nvme
from dslaunch.plan.case import Case
from dslaunch.plan.grids import stretches
from dslaunch.schema.cluster import Link
from dslaunch.schema.model import Decoder

_ADAM_BYTES = 28
"""HBM traffic per parameter of a fused Adam step: master, moments read and written, gradient, new weight."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and what they are made of."""

    stages: dict[str, tuple[dict[str, float], ...]]
    """By component and stage: term -> seconds a step."""
    step_s: float
    bubble: float
    """Share of the trunk's part of the step in which its stages idle, on average over them."""
    model_flops: float
    """All ranks, one step, no recompute."""
    hardware_flops: float
    """The same with recompute."""


def step_time(cases: Mapping[str, Case], efficiency: Efficiency) -> StepTime:
    """The ledger of a whole step."""
    stages = {
        name: tuple(_stage_terms(case, stage, efficiency) for stage in range(case.layout.pp))
        for name, case in cases.items()
    }
    spans = {name: _span(case, stages[name]) for name, case in cases.items()}
    step = _joined(cases, spans)
    trunk = next(name for name, case in cases.items() if case.is_trunk)
    model = sum(_model_flops(case) for case in cases.values())
    extra = sum(_recompute_flops(case) * _samples_per_step(case) for case in cases.values())
    return StepTime(stages, step, _idle(stages[trunk], spans[trunk]), model, model + extra)


def _joined(cases: Mapping[str, Case], spans: Mapping[str, float]) -> float:
    """Components on the same ranks take turns; the rank with most to do ends the step."""
    held = stretches({name: case.layout for name, case in cases.items()})
    return max(sum(spans[name] for name in names) for _, names in held)


def _running(terms: Mapping[str, float]) -> float:
    """Seconds that a stage spends on its micro-batches."""
    return sum(terms[term] for term in ("compute", "recompute", "tp", "pp"))


def _once(terms: Mapping[str, float]) -> float:
    """Seconds that a stage spends once a step, after its micro-batches."""
    return sum(terms[term] for term in ("dp", "optimizer", "offload"))


def _span(case: Case, stages: tuple[dict[str, float], ...]) -> float:
    """Seconds from the first forward to the end of the step."""
    m, p, v = case.layout.num_microbatches, case.layout.pp, case.layout.vpp
    slowest = max(_running(terms) for terms in stages)
    wait = slowest / m * (p - 1) / v
    return slowest + wait + max(_once(terms) for terms in stages)


def _idle(stages: tuple[dict[str, float], ...], span: float) -> float:
    """Share of `span` in which a stage, on average, has nothing to do."""
    return 1 - sum((_running(terms) + _once(terms)) / span for terms in stages) / len(stages)


def _stage_terms(case: Case, stage: int, efficiency: Efficiency) -> dict[str, float]:
    """Seconds of one stage in a step, by term; those of every micro-batch are added up."""
    layout, cluster = case.layout, case.config.cluster
    peak = cluster.gpu.peak_tflops
    precision = case.config.training.precision
    rate = peak.get(precision, peak.get("fp32", 1.0)) * 1e12 * efficiency.matrix
    m = layout.num_microbatches
    forward, backward = _stage_flops(case, stage)
    recompute = _recompute_of(case, stage)
    scale = case.samples / (layout.tp * layout.cp) * m / rate
    compute = (forward + backward) * scale
    hideable = backward * scale
    return {
        "compute": compute,
        "recompute": recompute * scale,
        "tp": m * (_tensor_seconds(case, stage, efficiency) + _expert_seconds(case, stage, efficiency)),
        "pp": m * _pipeline_seconds(case, efficiency),
        "dp": _exposed_dp(case, stage, efficiency, hideable),
        "optimizer": _optimizer_seconds(case, stage, efficiency),
        "offload": _offload_seconds(case, stage, efficiency),
    }


def _component_flops(case: Case) -> Flops:
    return flops(case.component, case.tokens * case.layout.cp, reads=case.reads)


def _stage_flops(case: Case, stage: int) -> tuple[float, float]:
    """(forward, backward) FLOPs of one pass through a stage, all tp ranks together."""
    layout, parts = case.layout, _component_flops(case)
    layers = _layers_of(case, stage)
    ends = (parts.stem if stage == 0 else 0) + (parts.tail if stage == layout.pp - 1 else 0)
    reached = sum(parts.layers[layer] for layer in layers if layer >= case.lowest_layer)
    return float(sum(parts.layers[layer] for layer in layers) + ends), _backward_factor(case) * (reached + ends)


def _layers_of(case: Case, stage: int) -> range:
    first = case.first_layer(stage)
    return range(first, first + case.layout.layers_per_stage[stage])


def _backward_factor(case: Case) -> float:
    """2 where inputs and weights get gradients, 1 where only inputs do, 0 where nothing before trains.

    Where adapters train, all inputs need gradients, and of the weights those of the adapters alone; where some
    layers do, this holds for the layers from the lowest of them on, the frozen among them taken as trained.
    """
    if case.frozen:
        return 1.0 if case.passes_gradient else 0.0
    return 1.0 if case.component.lora else 2.0


def _recompute_of(case: Case, stage: int) -> float:
    """FLOPs of one pass through a stage that run again in the backward pass."""
    if _backward_factor(case) == 0 or case.layout.recompute == "none":
        return 0.0
    parts = _component_flops(case)
    again = parts.attention_cores if case.layout.recompute == "selective" else parts.layers
    return float(sum(again[layer] for layer in _layers_of(case, stage) if layer >= case.lowest_layer))


def _recompute_flops(case: Case) -> float:
    return sum(_recompute_of(case, stage) for stage in range(case.layout.pp))


def _samples_per_step(case: Case) -> int:
    return case.config.training.global_batch * case.component.passes


def _model_flops(case: Case) -> float:
    stages = [_stage_flops(case, stage) for stage in range(case.layout.pp)]
    return sum(forward + backward for forward, backward in stages) * _samples_per_step(case)


def _seconds(link: Link, moved: float, hops: int, efficiency: Efficiency) -> float:
    return moved / (link.gb_per_s * 1e9 * efficiency.link) + hops * link.latency_us * 1e-6


def _tensor_seconds(case: Case, stage: int, efficiency: Efficiency) -> float:
    """Four all-reduces of s*b*h a layer and micro-batch, two more under full recompute; a ring moves 2(t-1)/t."""
    layout = case.layout
    if layout.tp == 1 or case.component.arch == "mlp":
        return 0.0
    link = group_link(case.config.cluster, layout.tp)
    moved = 2 * (layout.tp - 1) / layout.tp * case.samples * case.tokens * case.component.hidden * case.width
    count = (4 if not case.frozen else 2) + (2 if layout.recompute == "full" else 0)
    return layout.layers_per_stage[stage] * count * _seconds(link, moved, 2 * (layout.tp - 1), efficiency)


def _expert_seconds(case: Case, stage: int, efficiency: Efficiency) -> float:
    """Four all-to-alls a layer with experts: tokens to their experts and back, forward and backward."""
    layout, component = case.layout, case.component
    if layout.ep == 1 or not isinstance(component, Decoder) or component.experts is None:
        return 0.0
    experts = component.experts
    mixed = sum(layer >= experts.dense_layers for layer in _layers_of(case, stage))
    tokens = case.samples * case.tokens * experts.top_k
    moved = (layout.ep - 1) / layout.ep * tokens * component.hidden * case.width
    link = group_link(case.config.cluster, layout.tp * layout.ep)
    return mixed * 4 * _seconds(link, moved, layout.ep - 1, efficiency)


def _pipeline_seconds(case: Case, efficiency: Efficiency) -> float:
    """Activations to the next stage and gradients back, each virtual stage once."""
    layout = case.layout
    if layout.pp == 1 or case.component.arch == "mlp":
        return 0.0
    cut = layout.tp if case.sequence_parallel else 1
    moved = case.samples * case.tokens * case.component.hidden * case.width / cut
    link = group_link(case.config.cluster, layout.ranks)
    return 2 * layout.vpp * _seconds(link, moved, 1, efficiency)


def _exposed_dp(case: Case, stage: int, efficiency: Efficiency, hideable: float) -> float:
    """Gradients reduced and weights gathered over the replicas, less what the backward pass hides.

    A ring moves (N-1)/N of the bytes for a reduce-scatter, as much for an all-gather, twice for ZeRO-0's
    all-reduce. ZeRO-3 gathers weights for the forward and for the backward of every micro-batch.
    """
    layout, n = case.layout, case.layout.shard
    if n == 1 or case.frozen:
        return 0.0
    link = group_link(case.config.cluster, layout.tp * n)
    share, held = (n - 1) / n, case.counts(stage)
    times = layout.num_microbatches if layout.zero in case.engine.reduces_every_microbatch else 1
    reduce_width = WIDTH[case.grad_accum_dtype] if times == 1 else case.width
    passes = 1 if layout.zero else 2
    reduce = times * passes * _seconds(link, share * held.trained * reduce_width, n - 1, efficiency)
    gathers = {0: 0, 3: 2 * times}.get(layout.zero, 1)
    gathered = held.total if layout.zero == 3 else held.trained
    gather = gathers * _seconds(link, share * gathered * case.width, n - 1, efficiency)
    if layout.zero == 3:
        reduce, gather = _zero_plus_plus(case, reduce, gather, efficiency)
    reduce += times * _replica_seconds(case, held.trained * reduce_width / n, efficiency)
    overlapped = case.engine.overlaps_reduction and case.config.training.overlap_comm and layout.pp == 1
    if not overlapped:
        return reduce + gather
    if layout.zero == 3:
        return max(0.0, reduce + gather - hideable)
    return max(0.0, reduce - hideable) + gather


def _replica_seconds(case: Case, shard_bytes: float, efficiency: Efficiency) -> float:
    """HSDP's all-reduce of a shard of the gradients over its replicas."""
    layout = case.layout
    replicas = layout.dp * layout.cp // layout.shard
    link = group_link(case.config.cluster, layout.ranks)
    moved = 2 * (replicas - 1) / replicas * shard_bytes
    return _seconds(link, moved, 2 * (replicas - 1), efficiency) if replicas > 1 else 0.0


def _zero_plus_plus(case: Case, reduce: float, gather: float, efficiency: Efficiency) -> tuple[float, float]:
    """(reduce, gather) with ZeRO++: int8 weights, int4 gradients, the backward's gather within a node.

    qwZ moves half of bf16's bytes, qgZ a quarter, with scales of 1/64 of them (arXiv:2306.10209 section 3).
    """
    plus, size = case.config.strategy.zero_plus_plus, hpz(case.config)
    scales = 1 + 1 / 64
    if plus.quantized_gradients:
        reduce *= scales / (2 * case.width)
    if size > 1:
        near = group_link(case.config.cluster, size)
        far = group_link(case.config.cluster, case.layout.tp * case.layout.shard)
        gather = gather / 2 * (1 + far.gb_per_s / near.gb_per_s)
    if plus.quantized_weights:
        gather *= scales / case.width
    return reduce, gather


def _optimizer_seconds(case: Case, stage: int, efficiency: Efficiency) -> float:
    if case.frozen or case.layout.offload != "none":
        return 0.0
    sharded = case.layout.shard if case.layout.zero else 1
    moved = case.counts(stage).trained / sharded * _ADAM_BYTES
    return moved / (case.config.cluster.gpu.hbm_gb_per_s * 1e9 * efficiency.hbm)


def _offload_seconds(case: Case, stage: int, efficiency: Efficiency) -> float:
    """Gradients down and weights up over PCIe, Adam in host memory, and what goes to NVMe and back."""
    if case.frozen or case.layout.offload == "none":
        return 0.0
    shard = case.counts(stage).trained / case.layout.shard
    pcie = case.config.cluster.gpu.pcie_gb_per_s * 1e9 * efficiency.pcie
    gathers = 2 * case.layout.num_microbatches if case.layout.offload.endswith("_params") else 1
    moved = shard * (4 + case.width * gathers) / pcie
    adam = shard * _ADAM_BYTES / (efficiency.host_adam_gb_per_s * 1e9)
    return moved + adam + nvme.seconds(case, stage)
