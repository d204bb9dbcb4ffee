"""Seconds that a stage computes for one micro-batch on one rank, and which of them run again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from dslaunch.hardware.efficiency import Tables
from dslaunch.hardware.kernels import Device, device
from dslaunch.model.blocks import blocks
from dslaunch.model.eager import ATTENTION_TOO, EVERY_SECOND_PRODUCT
from dslaunch.model.passes import Pass
from dslaunch.model.tokens import ALONE
from dslaunch.model.work import Batch, Work, layer_work, stem_work, tail_work
from dslaunch.plan.case import Case
from dslaunch.plan.wide import in_own_type, spans
from dslaunch.schema.model import Component, Decoder, Mlp, Other

_FLASH_BACKWARD = 2.5
"""Products backward by those forward in fused attention, which makes the scores again (arXiv:2205.14135)."""
_SCAN_BACKWARD = 3.0
"""The same of a state space's scan, which makes the chunks' states and C B^T again (state-spaces/mamba:
mamba_ssm/ops/triton/ssd_combined.py, 2.2)."""
_COMPILED_PASSES = 0.55
"""Of torch.compile, which joins kernels that compute little: their traffic."""
_STARTED = {"compiled": 0.5, "graphs": 0.25}
"""Kernels that the host still starts."""
_SELECTIVE_OF_TORCH = 0.5
"""Share of the products that torchtitan's selective checkpointing runs again: every second one."""
_GAP = 2.5e-6
"""Seconds between a kernel's end and the next one's start on the GPU."""
_ACCUMULATED = 8
"""Bytes that a weight's gradient adds to the product's own output: read and written in fp32."""


@dataclass(frozen=True)
class Spent:
    """Seconds, and kernels started."""

    products: float = 0.0
    """Matrix products, forward."""
    core: float = 0.0
    """Attention cores, forward."""
    light: float = 0.0
    """Kernels that compute little, forward."""
    inputs: float = 0.0
    """Backward: everything but the weights' gradients."""
    weights: float = 0.0
    """Backward: the weights' gradients."""
    started: float = 0.0
    """Kernels forward; backward there are twice as many."""

    @property
    def forward(self) -> float:
        return self.products + self.core + self.light

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, number: float) -> Spent:
        return Spent(*(value * number for value in vars(self).values()))


@dataclass(frozen=True)
class _Speeds:
    """What seconds depend on beside the work."""

    device: Device
    passes: float
    score_passes: float
    """Of unfused attention's scores: Megatron's kernel scales, masks and normalises at once
    (megatron/fused_kernels)."""
    width: int
    narrow: bool
    fused: bool


def speeds(case: Case, tables: Tables) -> _Speeds:
    """The GPU and the software of a case."""
    software = case.software
    passes = tables.family(software.family, case.engine.deepspeed).passes
    fused_scores = software.family == "megatron"
    return _Speeds(
        device(case.config.cluster.gpu, tables, case.config.training.precision, software),
        passes * (_COMPILED_PASSES if software.compiled else 1.0),
        1.0 if fused_scores else passes,
        case.width,
        software.fp8 != "none",
        software.flash_attention,
    )


def batch(case: Case) -> Batch:
    """One micro-batch of a case; of those with the same work one, for which it is reckoned once."""
    cut = case.layout.cp if case.is_trunk else 1
    return _alike(case.run, case.samples, cut, isinstance(case.component, Decoder))


@lru_cache(maxsize=16384)
def _alike(run: Pass, samples: int, cp: int, decoder: bool) -> Batch:
    """Fused attention over half the samples, each cut half as often, has as many rows, and as many keys for
    each; what runs again is told by `again`."""
    times = math.gcd(samples, cp) if decoder and run.software.flash_attention and run.reads == ALONE else 1
    plain = replace(run, tokens=run.tokens * times, recompute="none", together=1, cp=1)
    return Batch(plain, samples // times, cp // times)


def layers_spent(case: Case, stage: int, at: _Speeds) -> Spent:
    """Of the layers of a stage."""
    first, number = case.first_layer(stage), case.layout.layers_per_stage[stage]
    if not any(case.software.wide_layers):
        return _layers(case.component, batch(case), first, number, at)
    found = Spent()
    for wide, start, size in spans(case, first, number):
        of = replace(batch(case), run=in_own_type(batch(case).run)) if wide else batch(case)
        found += _layers(case.component, of, start, size, replace(at, narrow=at.narrow and not wide))
    return found


def ends_spent(case: Case, stage: int, at: _Speeds) -> Spent:
    """Of what stands before the first layer and after the last, where the stage has them."""
    found = Spent()
    if stage == 0:
        found += _end(case.component, batch(case), False, at)
    if stage == case.tail_stage:
        found += _end(case.component, batch(case), True, at)
    return found


def whole_spent(case: Case, at: _Speeds) -> Spent:
    """Of a whole component, all its stages together."""
    return _whole(case.component, batch(case), sum(case.layout.layers_per_stage), at)


@lru_cache(maxsize=4096)
def _whole(component: Component, of: Batch, layers: int, at: _Speeds) -> Spent:
    ends = _end(component, of, False, at) + _end(component, of, True, at)
    return _layers(component, of, 0, layers, at) + ends


def started_at(case: Case) -> float:
    """Kernels that the host starts, by those of a plain program."""
    software = case.software
    return (_STARTED["compiled"] if software.compiled else 1.0) * (
        _STARTED["graphs"] if software.graphs else 1.0
    )


def again(case: Case, spent: Spent, number: int) -> float:
    """Seconds of a stage's `number` layers that run again in the backward pass."""
    how, software = case.layout.recompute, case.software
    if how == "full":
        covered = number if software.recompute_layers is None else min(number, software.recompute_layers)
        return spent.forward * covered / max(1, number)
    if how == "none":
        return 0.0
    modules = software.recompute_modules
    if EVERY_SECOND_PRODUCT in modules:
        return _SELECTIVE_OF_TORCH * spent.products + spent.light + (ATTENTION_TOO in modules) * spent.core
    found = spent.core if not modules or "core_attn" in modules else 0.0
    if any(module in modules for module in ("mlp", "moe")):
        found += 0.6 * spent.products
    return found + (0.5 * spent.light if any("norm" in m or "act" in m for m in modules) else 0.0)


@lru_cache(maxsize=16384)
def _layers(component: Component, of: Batch, first: int, number: int, at: _Speeds) -> Spent:
    found = Spent()
    for layer, count in kinds(component, first, number):
        found += _layer(component, of, layer, at).times(count)
    return found


@lru_cache(maxsize=4096)
def kinds(component: Component, first: int, number: int) -> tuple[tuple[int, int], ...]:
    """(a layer, how many of the stage are like it)."""
    if isinstance(component, Mlp | Other):
        return ((0, 1),)
    every = blocks(component)
    alike = Counter(every[first : first + number])
    return tuple((every.index(block), count) for block, count in alike.items())


@lru_cache(maxsize=16384)
def _layer(component: Component, of: Batch, layer: int, at: _Speeds) -> Spent:
    return _spent(layer_work(component, of, layer), at)


@lru_cache(maxsize=8192)
def _end(component: Component, of: Batch, tail: bool, at: _Speeds) -> Spent:
    return _spent((tail_work if tail else stem_work)(component, of), at)


def _spent(work: Work, at: _Speeds) -> Spent:
    gpu, width = at.device, at.width
    products = core = inputs = weights = 0.0
    for product in work.products:
        narrow = product.narrow and at.narrow
        for_input, for_weight = product.backward()
        products += gpu.gemm(product.gemm, width, narrow)
        inputs += gpu.gemm(for_input, width, narrow)
        written = _ACCUMULATED * for_weight.m * for_weight.n * for_weight.count / gpu.memory
        weights += max(gpu.gemm(for_weight, width, narrow), written)
    for part in work.cores:
        once = (
            gpu.core(part.flops, part.head, part.keys)
            if at.fused
            else sum(gpu.batched(gemm, width) for gemm in part.unfused)
        )
        core += once
        inputs += once * (_FLASH_BACKWARD if at.fused else 2.0)
    per_element = width * at.passes / gpu.memory
    per_score = width * at.score_passes / gpu.memory
    core += work.squares[0] * per_score
    scan = sum(gpu.core(part.flops, part.head, part.keys) for part in work.scans)
    light = work.elements[0] * per_element + work.kernels[0] * _GAP + work.flops / gpu.peak + scan
    inputs += work.elements[1] * per_element + work.squares[1] * per_score
    inputs += work.kernels[1] * _GAP + work.flops / gpu.peak + _SCAN_BACKWARD * scan
    return Spent(products, core, light, inputs, weights + work.flops / gpu.peak, work.kernels[0])
