"""Layers at a model's ends that compute in the run's own type beside others in fp8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from dslaunch.model.passes import Pass
from dslaunch.plan.case import Case


def spans(case: Case, first: int, number: int) -> Iterator[tuple[bool, int, int]]:
    """(whether in the run's own type, first layer, how many) of `number` layers from `first` on, in order."""
    start, end = case.software.wide_layers if case.software.fp8 != "none" else (0, 0)
    last = max(start, sum(case.layout.layers_per_stage) - end)
    bounds = [first, *(min(max(cut, first), first + number) for cut in (start, last)), first + number]
    for wide, (low, high) in zip((True, False, True), pairwise(bounds), strict=True):
        if low < high:
            yield wide, low, high - low


def in_own_type(run: Pass) -> Pass:
    """The same pass without fp8."""
    return replace(run, software=replace(run.software, fp8="none", narrow_weights=False))
