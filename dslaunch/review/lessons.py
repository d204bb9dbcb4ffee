"""What runs teach of the rates: each a lesson, or the reason why it teaches nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dslaunch.engines.native import layers_of
from dslaunch.engines.registry import ENGINES
from dslaunch.hardware.corrections import NONE, Correction, Lesson, correction, time_weight
from dslaunch.hardware.efficiency import Tables
from dslaunch.hardware.software import OF_ENGINE
from dslaunch.planfile import Plan, Prediction, to_json
from dslaunch.review.runs import Run

WARM_UP = 5
"""First steps, in which kernels are compiled, memory is allocated and files are read for the first time."""
LEAST = 15
"""Steps after them."""


@dataclass(frozen=True)
class Taught:
    """A correction, and what it was before."""

    key: str
    """GPU/software."""
    before: Correction
    after: Correction
    weight: float
    """Share of the measured time that is believed."""


def lesson(run: Run, tables: Tables) -> Lesson | str:
    """What the run teaches, or why it teaches nothing.

    Args:
        tables: the shipped ones.
    """
    steps = _timed(run.measured.steps[WARM_UP:])
    if reason := _unfit(run, len(steps), tables):
        return reason
    corrected = run.prediction.calibration
    time, memory = (corrected.time, corrected.memory) if corrected else (1.0, 1.0)
    return Lesson(
        run=run.folder.resolve().name,
        plan_sha256=run.prediction.plan_sha256,
        step_s=median(steps),
        predicted_step_s=run.prediction.step_time_s / time,
        memory_gib=_peak_gib(run.measured.steps),
        predicted_gib=run.prediction.allocated_gib / memory,
    )


def taught(
    lessons: Iterable[tuple[Plan, Lesson]], known: Mapping[str, Correction], tables: Tables
) -> list[Taught]:
    """What is learned by GPU and software; runs that are known by name are replaced.

    Args:
        known: corrections so far.
        tables: the shipped ones.
    """
    by_key: dict[str, dict[str, Lesson]] = {}
    family: dict[str, str] = {}
    for plan, each in lessons:
        key, family_of = kept_as(plan, tables)
        before = by_key.setdefault(key, {run.run: run for run in known.get(key, NONE).runs})
        before[each.run], family[key] = each, family_of
    return [_taught(key, list(runs.values()), family[key], known, tables) for key, runs in by_key.items()]


def _taught(
    key: str, runs: Sequence[Lesson], family: str, known: Mapping[str, Correction], tables: Tables
) -> Taught:
    time, memory = tables.time_bands.get(family), tables.memory_bands.get(family)
    found = correction(runs, time, memory)
    return Taught(key, known.get(key, NONE), found, time_weight(found.plans, time))


def kept_as(plan: Plan, tables: Tables) -> tuple[str, str]:
    """(GPU/software, the software's family)."""
    family = OF_ENGINE[layers_of(plan.engine.name, plan.program.script or plan.program.module)].family
    return tables.key(plan.cluster.gpu, family, ENGINES[plan.engine.name].deepspeed), family


def _unfit(run: Run, steps: int, tables: Tables) -> str:
    """Why the run teaches nothing; empty where it does."""
    status = run.measured.state.status
    if run.plan.cluster.accelerator == "cpu":
        return "ran on CPUs; what is learned is the speed and the memory of GPUs"
    if status == "failed":
        return "failed, so its steps may be those of a job that went wrong"
    if hashlib.sha256(to_json(run.plan).encode()).hexdigest() != run.prediction.plan_sha256:
        return "its prediction.json is of another plan.json"
    if _rates(run.prediction) != tables.sha256():
        return "was predicted by another version's rates; launch it again with this one"
    if steps < LEAST:
        return (
            f"is {status}, and its metrics.jsonl has {steps} timed steps after the first {WARM_UP}; "
            f"{LEAST} or more teach something"
        )
    return ""


def _rates(prediction: Prediction) -> str:
    """Hash of the shipped rates that the run was predicted with."""
    return prediction.calibration.shipped_sha256 if prediction.calibration else prediction.tables_sha256


def _timed(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(row["step_time_s"]) for row in steps if _positive(row["step_time_s"])]


def _peak_gib(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Of tensors on the GPU, where the program measured that."""
    return max(
        (
            float(row["memory_gib"])
            for row in steps
            if row["memory_kind"] == "cuda_peak_allocated" and _positive(row["memory_gib"])
        ),
        default=None,
    )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
