"""The time ledger: seconds of one optimizer step, by component, stage and term. The dataloader is not in it.

The slowest stage is the pipeline's clock; communication counts where nothing hides it; a GPU that runs out of
kernels waits for its host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from dslaunch.hardware.efficiency import FamilyRates, GpuRates, Tables, host_slowness
from dslaunch.plan import gradients, host_time, traffic
from dslaunch.plan.case import Case
from dslaunch.plan.compute import again, ends_spent, kinds, layers_spent, speeds, started_at
from dslaunch.plan.grids import stretches
from dslaunch.plan.schedules import filling_s, waiting_s
from dslaunch.plan.step_flops import backward_factor, model_flops, recompute_flops
from dslaunch.plan.traffic import layer_range
from dslaunch.schema.components import Component

_STEP_BYTES = 44
"""HBM traffic per parameter of a whole optimizer step: Adam's, the gradient's norm, scaling and zeroing."""
_HALF_STEP_BYTES = 20
"""The same where all states are in 16 bits."""
_SENT_KERNELS = 4
"""Kernels that a layer's collectives add."""
_EXPERTS_EXPOSED = {False: 1.0, True: 0.55}
"""Share of the exchange with experts that costs time: its kernels take multiprocessors from what runs beside
them. From pairs of runs with and without (yanring/Megatron-MoE-ModelZoo: best_practice/qwen3/readme.md;
NVIDIA-NeMo/ Megatron-Bridge: skills/perf-techniques)."""
_ONCE = ("dp", "optimizer", "offload")
"""Terms of what a stage does once a step, after its micro-batches."""


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


Known = dict[tuple[object, ...], "_Micro"]
"""What stages take of a micro-batch, by all that it depends on under one configuration, engine and tables."""


def step_time(cases: Mapping[str, Case], tables: Tables, known: Known | None = None) -> StepTime:
    """The ledger of a whole step.

    Args:
        known: what was computed before, of the same configuration, engine and tables; grows.
    """
    known = {} if known is None else known
    stages = {name: _stages(case, tables, known) for name, case in cases.items()}
    spans = {name: _span(case, stages[name]) for name, case in cases.items()}
    step = _joined(cases, spans)
    trunk = next(name for name, case in cases.items() if case.is_trunk)
    model = sum(model_flops(case) for case in cases.values())
    extra = sum(recompute_flops(case) for case in cases.values())
    every = {name: tuple(found.terms[at] for at in found.kind) for name, found in stages.items()}
    return StepTime(every, step, _idle(stages[trunk], spans[trunk]), model, model + extra)


def span_s(case: Case, tables: Tables, known: Known) -> float:
    """Seconds of a step that one component takes of its ranks, which it shares with none."""
    return _span(case, _stages(case, tables, known))


@dataclass(frozen=True)
class _Stages:
    """The stages of a component, those that take the same time once."""

    terms: tuple[dict[str, float], ...]
    """By kind of stage: term -> seconds a step."""
    kind: tuple[int, ...]
    """By stage."""
    filling: tuple[float, ...]
    """By kind of stage: seconds that one adds to a step beside the slowest."""
    waiting: tuple[float, ...]
    """By kind of stage: seconds of a step that one waits for others once the pipeline is full."""

    def summed(self, seconds: Callable[[Mapping[str, float]], float]) -> float:
        """Over all stages."""
        return sum(seconds(terms) * self.kind.count(at) for at, terms in enumerate(self.terms))


def micro_batch_s(case: Case, stage: int, tables: Tables, known: Known) -> float:
    """Seconds of a micro-batch on a stage, without sends to other stages and the adding up of gradients."""
    rates = _rates(case, tables)
    micro = _known_micro(case, stage, rates, known)
    busy = micro.forward + micro.backward + micro.repeated + sum(micro.sent.values())
    return case.correction(tables).time * (busy + _waiting(busy, _host_s(case, micro, rates)))


def _stages(case: Case, tables: Tables, known: Known) -> _Stages:
    layout = case.layout
    firsts, kind = stage_kinds(case.component, layout.layers_per_stage, case.lowest_layer, case.tail_stage)
    made = [_stage_terms(case, stage, tables, known) for stage in firsts]
    terms, filling, waiting = zip(*made, strict=True)
    return _Stages(terms, kind, filling, waiting)


@lru_cache(maxsize=4096)
def stage_kinds(
    component: Component, layers_per_stage: tuple[int, ...], lowest: int, tail_stage: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the first stage of each kind, the kind of each stage).

    Stages with layers of the same kinds, of which gradients reach the same share, take the same time, but for the
    first and the last.

    Args:
        lowest: the first layer that gradients reach.
    """
    known: dict[object, int] = {}
    first, kind, firsts = 0, list[int](), list[int]()
    for stage, number in enumerate(layers_per_stage):
        ends = (stage == 0, stage == tail_stage)
        alike = (ends, kinds(component, first, number), _share_from(lowest, range(first, first + number)))
        if alike not in known:
            firsts.append(stage)
        kind.append(known.setdefault(alike, len(known)))
        first += number
    return tuple(firsts), tuple(kind)


def _joined(cases: Mapping[str, Case], spans: Mapping[str, float]) -> float:
    """Components on the same ranks take turns; the rank with most to do ends the step."""
    held = stretches({name: case.layout for name, case in cases.items()})
    return max(sum(spans[name] for name in names) for _, names in held)


def _running(terms: Mapping[str, float]) -> float:
    """Seconds that a stage spends on its micro-batches."""
    return sum(seconds for term, seconds in terms.items() if term not in _ONCE)


def _once(terms: Mapping[str, float]) -> float:
    """Seconds that a stage spends once a step, after its micro-batches."""
    return sum(terms[term] for term in _ONCE)


def _span(case: Case, stages: _Stages) -> float:
    """Seconds from the first forward to the end of the step.

    The slowest stage runs without a pause once it has work; the others' share of one micro-batch fills and
    drains the pipeline, a v-th of it under the interleaved schedule (arXiv:2104.04473, section 2.2), and less
    where the backward pass is split (`dslaunch.plan.schedules`); with each macro-batch anew.
    """
    running = [_running(terms) + waits for terms, waits in zip(stages.terms, stages.waiting, strict=True)]
    slowest = max(running)
    every = sum(filling * stages.kind.count(at) for at, filling in enumerate(stages.filling))
    filling = (every - stages.filling[running.index(slowest)]) * case.config.training.macro_batches
    return slowest + filling + max(_once(terms) for terms in stages.terms)


def _idle(stages: _Stages, span: float) -> float:
    """Share of `span` in which a stage, on average, has nothing to do."""
    return 1 - stages.summed(lambda terms: _running(terms) + _once(terms)) / span / len(stages.kind)


@dataclass(frozen=True)
class _Rates:
    tables: Tables
    gpu: GpuRates
    family: FamilyRates


@dataclass(frozen=True)
class _Micro:
    """Seconds of one micro-batch on a stage; left out are what goes to other stages, and adding gradients up."""

    forward: float
    backward: float
    weights: float
    """Of `backward`, the weights' gradients."""
    repeated: float
    sent: dict[str, float]
    started: float
    """Kernels that the host starts."""


def _stage_terms(
    case: Case, stage: int, tables: Tables, known: Known
) -> tuple[dict[str, float], float, float]:
    """(seconds of one stage in a step, by term; what it adds to filling; what it waits for others)."""
    rates, layout, gpu = _rates(case, tables), case.layout, case.config.cluster.gpu
    micro = _known_micro(case, stage, rates, known)
    added = gradients.seconds(case, stage, gpu.hbm_gb_per_s * 1e9 * rates.gpu.hbm)
    backward = micro.backward + added
    sent = {**micro.sent, "pp": _pipeline(case, rates)}
    busy = micro.forward + backward + micro.repeated + sum(sent.values())
    terms = {"compute": micro.forward + backward, "recompute": micro.repeated, **sent}
    terms["launch"] = _waiting(busy, _host_s(case, micro, rates))
    step = {name: seconds * layout.num_microbatches for name, seconds in terms.items()} | {
        "dp": _exposed_dp(case, stage, rates, micro.forward, backward + micro.repeated),
        "optimizer": _optimizer_seconds(case, stage, rates),
        "offload": _offload_seconds(case, stage, rates, micro.forward, backward + micro.repeated),
    }
    factor = case.correction(tables).time
    forward, weights = micro.forward + sum(sent.values()) / 2, micro.weights + added
    inputs = sum(terms.values()) - forward - weights
    schedule = case.config.training.schedule or "1f1b"
    filling = filling_s(schedule, layout.pp, layout.vpp, forward, inputs, weights)
    waiting = layout.num_microbatches * waiting_s(schedule, forward, inputs, weights) * (layout.pp > 1)
    return {name: seconds * factor for name, seconds in step.items()}, filling * factor, waiting * factor


def _rates(case: Case, tables: Tables) -> _Rates:
    family = tables.family(case.software.family, case.engine.deepspeed)
    return _Rates(tables, tables.gpu(case.config.cluster.gpu), family)


def _known_micro(case: Case, stage: int, rates: _Rates, known: Known) -> _Micro:
    layout = case.layout
    key = (
        case.name, layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute,
        case.first_layer(stage), layout.layers_per_stage[stage], stage == 0, stage == case.tail_stage,
    )  # fmt: skip
    return known.get(key) or known.setdefault(key, _micro(case, stage, rates))


def _host_s(case: Case, micro: _Micro, rates: _Rates) -> float:
    """Seconds in which the host starts a micro-batch's kernels."""
    return micro.started * rates.family.launch_us * 1e-6 * host_slowness(case.config.cluster.gpu)


def _micro(case: Case, stage: int, rates: _Rates) -> _Micro:
    family, at = rates.family, speeds(case, rates.tables)
    layers, ends = layers_spent(case, stage, at), ends_spent(case, stage, at)
    share, factor = _reached(case, stage), backward_factor(case)
    backward = factor and share * layers.inputs + ends.inputs
    weights = (share * layers.weights + ends.weights) * (factor == 2)
    backward += weights
    repeated = again(case, layers, case.layout.layers_per_stage[stage]) * share * (factor > 0)
    repeats = repeated / layers.forward if layers.forward else 0.0
    unpacked = case.counts(stage).packed * case.software.dequantising / at.device.memory
    forward = layers.forward + ends.forward + unpacked
    backward += unpacked * (factor > 0)
    repeated += unpacked * (repeated > 0)
    sent = {
        "tp": _beside_products(
            case, traffic.tensor(case, stage, rates.gpu), layers.products, repeats, family
        ),
        "cp": _with_backward(case, traffic.context(case, stage, rates.gpu), repeats, layers.core, family),
        "ep": _EXPERTS_EXPOSED[case.software.overlap_ep]
        * _with_backward(case, traffic.experts(case, stage, rates.gpu), repeats, 0.0, family),
    }
    started = (layers.started + ends.started) * (1 + repeats + factor) * started_at(case)
    started += _SENT_KERNELS * case.layout.layers_per_stage[stage] * (case.layout.tp * case.layout.ep > 1)
    started += traffic.ring_kernels(case, stage) * (1 + repeats + factor) * started_at(case)
    return _Micro(forward, backward, weights, repeated, sent, started)


def _waiting(busy: float, host: float) -> float:
    """Seconds in which the GPU has no kernel: the host's time smoothly exceeds the GPU's."""
    longer = max(busy, host)
    return longer * ((busy / longer) ** 4 + (host / longer) ** 4) ** 0.25 - busy if longer else 0.0


def _beside(sent: float, computed: float, family: FamilyRates) -> float:
    """What is left of communication that runs beside `computed` seconds."""
    return max(sent - computed, (1 - family.hidden) * sent)


def _beside_products(
    case: Case, sent: tuple[float, float], products: float, repeats: float, family: FamilyRates
) -> float:
    """Tensor parallelism's, forward, backward, and in what runs again.

    PyTorch's asynchronous TP is for the forward pass: 20 % faster forward, 8 % over all, for Llama 3 70B
    (discuss.pytorch.org/t/209487).
    """
    forward, backward = sent
    if case.software.overlap_tp:
        forward = _beside(forward, products, family)
    if case.software.overlap_tp and case.software.family != "torch":
        backward = _beside(backward, 2 * products, family)
    backwards = (backward_factor(case) > 0) * backward
    return forward + backwards + (forward if case.layout.recompute == "full" else 0.0) * min(1.0, repeats)


def _with_backward(
    case: Case, sent: tuple[float, float], repeats: float, beside: float, family: FamilyRates
) -> float:
    """What is exposed of a ring or an exchange, `beside` seconds of computation forward."""
    ring = beside and not case.engine.deepspeed
    forward, backward = sent
    if ring:
        forward, backward = _beside(forward, beside, family), _beside(backward, 2.5 * beside, family)
    backwards = (backward_factor(case) > 0) * backward
    return forward + backwards + (forward * repeats if case.layout.recompute == "full" else 0.0)


def _pipeline(case: Case, rates: _Rates) -> float:
    """Sends are posted with the interleaved schedule's next computation, and waited for otherwise."""
    sent = traffic.pipeline(case, rates.gpu)
    overlapped = case.layout.vpp > 1 and case.config.training.overlap_comm
    return sent * (1 - rates.family.hidden) if overlapped else sent


def _reached(case: Case, stage: int) -> float:
    """Share of a stage's layers that gradients reach."""
    return _share_from(case.lowest_layer, layer_range(case, stage))


def _share_from(lowest: int, layers: range) -> float:
    """Of layers, those from the lowest on."""
    return min(1.0, max(0, layers.stop - lowest) / max(1, len(layers)))


def _exposed_dp(case: Case, stage: int, rates: _Rates, forward: float, backward: float) -> float:
    """Gradients reduced and weights gathered over the replicas, less what computation hides.

    ZeRO-3 gathers weights for the forward and for the backward of every micro-batch, and reduces in each; in
    a pipeline FSDP keeps what it has gathered until the step ends. Where gradients are reduced once a step,
    the last micro-batch's backward is all that can hide it.

    Args:
        forward: seconds of one micro-batch's forward, and `backward` of its backward.
    """
    layout, found = case.layout, traffic.replicas(case, stage, rates.gpu)
    m, engine = layout.num_microbatches, case.engine
    times = m if layout.zero in engine.reduces_every_microbatch and (layout.zero < 3 or layout.pp == 1) else 1
    overlaps = engine.overlaps_reduction and case.config.training.overlap_comm
    overlaps = overlaps and (layout.pp == 1 or not engine.deepspeed)
    if layout.zero == 3:
        parts = ((found.gather, forward), (found.gather + found.reduce, backward))
    else:
        parts = ((found.gather / times, 0.0 if engine.deepspeed else forward), (found.reduce, backward))
    if overlaps:
        return times * sum(_beside(sent, computed, rates.family) for sent, computed in parts)
    return times * sum(sent for sent, _ in parts)


def _optimizer_seconds(case: Case, stage: int, rates: _Rates) -> float:
    if case.frozen:
        return 0.0
    host = rates.family.step_ms * 1e-3 * host_slowness(case.config.cluster.gpu) if case.is_trunk else 0.0
    if case.layout.offload != "none":
        return host
    gpu = case.config.cluster.gpu
    each = _HALF_STEP_BYTES if case.software.half_states else _STEP_BYTES
    params = host_time.stepped(case, stage) * (1 - case.software.offloaded_states)
    return host + params * each / (gpu.hbm_gb_per_s * 1e9 * rates.gpu.hbm)


def _offload_seconds(case: Case, stage: int, rates: _Rates, forward: float, backward: float) -> float:
    """Of states and weights; and of activations what is exposed beside the forward and the backward of each
    micro-batch."""
    once, sent = host_time.states_s(case, stage, rates.tables), host_time.activations_s(case, stage, rates.tables)
    both = _beside(sent, forward, rates.family) + _beside(sent, backward, rates.family)
    return once + case.layout.num_microbatches * both
