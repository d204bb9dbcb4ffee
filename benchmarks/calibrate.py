"""`python -m benchmarks.calibrate`: the rates of GPUs and families of software, derived from published runs.

Every rate has a prior (`UNCALIBRATED`, from data sheets and papers) and a width around it; measurements move
it as far as they speak for it. What is minimised is the squared error of log(predicted / measured step
time), bounded for runs that fit nothing, with a publisher's weight growing much slower than its runs. Rates
of an architecture are fitted to all its GPUs, and each GPU's share of its peak deviates a little from them:
a GPU that nobody measured has its architecture's. The linear terms are computed once for each record, at the
prior, so that calibrating without one publisher takes seconds.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.flops_kinds import measured_step_s
from benchmarks.records import HOLDOUT, Record, published
from benchmarks.settings import Missing, Setting, setting
from benchmarks.statistics import held_out_with
from dslaunch.hardware.efficiency import (
    CARDS,
    RATES,
    UNCALIBRATED,
    FamilyRates,
    GpuRates,
    Tables,
    architecture,
    faster,
    named,
)
from dslaunch.plan.time import step_time
from dslaunch.schema.cluster import Gpu

_WIDTH = {
    "matrix": 0.08, "narrow": 0.08, "attention": 0.2, "own_attention": 0.2, "hbm": 0.1, "link": 0.12,
    "network": 0.2, "launch_us": 0.3, "passes": 0.25, "hidden": 0.5, "step_ms": 0.4,
}  # fmt: skip
"""How far a rate may be from its prior: standard deviation of its logarithm (of the share's logit, for
`hidden`)."""
_ONE_GPU = 0.05
"""The same of a GPU's speed from its architecture's."""
_NOISE = 0.12
"""Standard deviation of a run's logarithm about its ledger, by which measurements are weighed against priors."""
_BOUND = 1.0
"""Errors beyond this many of them count linearly."""
_QUALITY = {"A": 1.0, "B": 0.6, "C": 0.25}
_TEST = 0.05
"""Weight of a framework's tests: tiny models on machines that also wait for other things."""
_CROWD = 0.5
"""A publisher's weight grows as its number of runs to one less this."""
_LAYERS_OF = {"megatron_deepspeed": "megatron"}
"""Whose kernels compute a family's layers."""
_ROUNDS = 3
_STEP = 0.05

Rate = tuple[str, str, str]
"""(gpu, family or card; its name; the rate)."""


@dataclass(frozen=True)
class _Run:
    """One record with a measured speed."""

    found: Setting
    measured_s: float
    publisher: str
    quality: float

    @property
    def gpu(self) -> Gpu:
        return self.found.config.cluster.gpu

    @property
    def case(self) -> Any:
        return next(iter(self.found.cases.values()))


def calibrate(records: Sequence[Record]) -> Tables:
    """The tables that describe `records` best, given the priors."""
    runs = [run for record in records if (run := _run(record.id, _Key(record))) is not None]
    rates = _rates(runs)
    index = {rate: number for number, rate in enumerate(rates)}
    slopes = np.array([_row(run, index) for run in runs])
    weights = _weights(runs)
    prior = np.array([_ONE_GPU if kind == "card" else _WIDTH[name] for kind, _, name in rates])
    theta = np.zeros(len(rates))
    for _ in range(_ROUNDS):
        tables = _tables(rates, theta)
        error = np.array([_log_error(run, tables) for run in runs])
        bounded = weights / _NOISE**2 * np.minimum(1.0, _BOUND * _NOISE / np.maximum(np.abs(error), 1e-9))
        left = slopes.T @ (slopes * bounded[:, None]) + np.diag(prior**-2)
        right = -slopes.T @ (bounded * error) - theta * prior**-2
        theta = theta + np.clip(np.linalg.solve(left, right), -0.5, 0.5)
    return _tables(rates, theta)


class _Key:
    """A record as an argument of a cache: told apart by its id alone."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def __hash__(self) -> int:
        return hash(self.record.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.record == other.record


@lru_cache(maxsize=4096)
def _run(_name: str, key: _Key) -> _Run | None:
    """None where no speed was printed, a fact is missing, or the record is one that calibrates nothing."""
    record = key.record
    if HOLDOUT in record.tags:
        return None
    try:
        found = setting(record)
    except Missing:
        return None
    measured = measured_step_s(record, next(iter(found.cases.values())))
    if measured is None or "suspect" in record.tags:
        return None
    quality = _TEST if "ci" in record.tags else _QUALITY.get(record.quality, 0.25)
    return _Run(found, measured, held_out_with(record), quality)


def _rates(runs: Iterable[_Run]) -> list[Rate]:
    """Every rate that some run depends on."""
    found: dict[Rate, None] = {}
    for run in runs:
        found |= dict.fromkeys(_rates_of(run))
    return list(found)


def _rates_of(run: _Run) -> list[Rate]:
    kind, family = architecture(run.gpu), run.case.software.family
    if family == "megatron" and run.case.engine.deepspeed:
        family = "megatron_deepspeed"
    layers = {name: _LAYERS_OF.get(family, family) if name == "passes" else family for name in vars(FamilyRates())}
    return [
        *(("gpu", kind, name) for name in vars(GpuRates())),
        *(("family", owner, name) for name, owner in layers.items()),
        ("card", run.gpu.name, "speed"),
    ]


def _weights(runs: Sequence[_Run]) -> np.ndarray[Any, Any]:
    count = Counter(run.publisher for run in runs)
    return np.array([run.quality * count[run.publisher] ** -_CROWD for run in runs])


@lru_cache(maxsize=4096)
def _slope(run_id: str, key: _RunKey) -> tuple[tuple[Rate, float], ...]:
    """How the logarithm of a run's predicted time changes with each rate, at the prior."""
    run = key.run
    base = _log_error(run, UNCALIBRATED)
    return tuple(
        (rate, (_log_error(run, _tables([rate], [_STEP])) - base) / _STEP) for rate in _rates_of(run)
    )


@dataclass(frozen=True, eq=False)
class _RunKey:
    run: _Run


_KEYS: dict[str, _RunKey] = {}


def _row(run: _Run, index: dict[Rate, int]) -> np.ndarray[Any, Any]:
    row = np.zeros(len(index))
    name = run.found.record.id
    for rate, slope in _slope(name, _KEYS.setdefault(name, _RunKey(run))):
        row[index[rate]] = slope
    return row


def _log_error(run: _Run, tables: Tables) -> float:
    return math.log(step_time(run.found.cases, tables).step_s / run.measured_s)


def _tables(rates: Sequence[Rate], theta: Sequence[float] | np.ndarray[Any, Any]) -> Tables:
    """The priors, moved by `theta`."""
    gpus, families = dict(UNCALIBRATED.gpus), dict(UNCALIBRATED.families)
    for (kind, owner, name), by in zip(rates, theta, strict=True):
        if kind == "gpu":
            gpus[owner] = replace(gpus[owner], **{name: getattr(gpus[owner], name) * math.exp(by)})
        elif kind == "family":
            families[owner] = replace(
                families[owner], **{name: _moved(name, getattr(families[owner], name), by)}
            )
    for owner, layers in _LAYERS_OF.items():
        families[owner] = replace(families[owner], passes=families[layers].passes)
    deviations = {owner: by for (kind, owner, _), by in zip(rates, theta, strict=True) if kind == "card"}
    for owner in deviations.keys() | CARDS.keys():
        speed = CARDS.get(owner, 1.0) * math.exp(deviations.get(owner, 0.0))
        gpus[owner] = faster(gpus[named(owner) or "ampere"], speed)
    return replace(UNCALIBRATED, gpus=gpus, families=families)


def _moved(name: str, value: float, by: float) -> float:
    if name != "hidden":
        return value * math.exp(by)
    odds = value / (1 - value) * math.exp(by)
    return odds / (1 + odds)


def main() -> int:
    """Write the shipped tables from all published runs."""
    tables = calibrate(published())
    RATES.parent.mkdir(exist_ok=True)
    rates = {key: value for key, value in asdict(tables).items() if not key.endswith("_bands")}
    RATES.write_text(json.dumps(rates, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{RATES}: {len(tables.gpus)} GPUs and architectures, {len(tables.families)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
