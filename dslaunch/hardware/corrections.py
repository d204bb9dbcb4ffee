"""What a site's own runs correct of the shipped rates: a factor of time and one of memory, by GPU and software.

SITE/efficiency.yaml holds them with the runs that they come from. Runs of one plan count as one, since the ledger
errs alike on each of them; the median over plans is taken, and shrunk towards 1, the shipped rates. With n plans
the logarithm of the median is multiplied by n t^2 / (n t^2 + s^2): the posterior mean of a normal mean with prior
N(0, t^2) and noise s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from dslaunch.conffiles import loaded
from dslaunch.errors import ConfigError
from dslaunch.planfile import Band

FILE = "efficiency.yaml"
SCHEMA = "dslaunch.efficiency/1"
_TIME_NOISE, _MEMORY_NOISE = 0.12, 0.03
"""Standard deviation of a plan's log(measured / predicted) about that of its kind: what published runs of one
publisher leave of time (benchmarks/calibrate.py), and 3 % of memory."""
_UNKNOWN = 0.3
"""The prior's, where no published run of the kind says how far the shipped rates are off."""
_NINE_OF_TEN = 1.645
"""Standard deviations of a normal distribution to either side that hold 9 of 10."""


@dataclass(frozen=True)
class Lesson:
    """What one run measured, beside what the shipped rates predict of it."""

    run: str
    """Name of its folder."""
    plan_sha256: str
    step_s: float
    """Median over the steps after the first."""
    predicted_step_s: float
    memory_gib: float | None
    """Peak of max_memory_allocated on the rank that needs most; None where nothing measured it."""
    predicted_gib: float


@dataclass(frozen=True)
class Correction:
    """Of one GPU under one kind of software."""

    time: float
    """By which the shipped rates' seconds are multiplied."""
    memory: float
    """By which the components' GPU memory is multiplied."""
    runs: tuple[Lesson, ...] = ()

    @property
    def plans(self) -> int:
        return len({run.plan_sha256 for run in self.runs})


NONE = Correction(1.0, 1.0)


def correction(runs: Sequence[Lesson], time_band: Band | None, memory_band: Band | None) -> Correction:
    """What the runs say of the shipped rates.

    Args:
        time_band: how far published runs of the kind were from them.
        memory_band: the same of memory.
    """
    time = {run: run.step_s / run.predicted_step_s for run in runs}
    memory = {run: run.memory_gib / run.predicted_gib for run in runs if run.memory_gib is not None}
    return Correction(
        _shrunk(time, _spread(time_band), _TIME_NOISE),
        _shrunk(memory, _spread(memory_band), _MEMORY_NOISE),
        tuple(sorted(runs, key=lambda run: run.run)),
    )


def own_bands(
    found: Correction, time_band: Band | None, memory_band: Band | None
) -> tuple[Band, Band | None]:
    """(time, memory) about corrected figures, of a plan that has not run; None where none was measured."""
    measured = {run.plan_sha256 for run in found.runs if run.memory_gib is not None}
    return (
        _band(found.plans, len(found.runs), _spread(time_band), _TIME_NOISE),
        _band(len(measured), len(found.runs), _spread(memory_band), _MEMORY_NOISE) if measured else None,
    )


def _shrunk(ratios: Mapping[Lesson, float], prior: float, noise: float) -> float:
    by_plan: dict[str, list[float]] = {}
    for run, ratio in ratios.items():
        by_plan.setdefault(run.plan_sha256, []).append(math.log(ratio))
    if not by_plan:
        return 1.0
    return math.exp(weight(len(by_plan), prior, noise) * median(median(each) for each in by_plan.values()))


def weight(plans: int, prior: float, noise: float) -> float:
    """Share of the plans' median that is believed."""
    return plans * prior**2 / (plans * prior**2 + noise**2)


def time_weight(plans: int, time_band: Band | None) -> float:
    """The same of time."""
    return weight(plans, _spread(time_band), _TIME_NOISE)


def _spread(band: Band | None) -> float:
    """Standard deviation of the logarithm that a band of 9 of 10 stands for."""
    return _UNKNOWN if band is None else math.log(band.high / band.low) / (2 * _NINE_OF_TEN)


def _band(plans: int, runs: int, prior: float, noise: float) -> Band:
    left = prior**2 * (1 - weight(plans, prior, noise))
    wide = math.exp(_NINE_OF_TEN * math.sqrt(noise**2 + left))
    return Band(1 / wide, wide, own=runs)


def text(found: Mapping[str, Correction], rates_sha256: str) -> str:
    """The file's text; figures to six digits, and keys in order, so that a commit shows what changed."""
    rows = {
        key: {
            "time": _rounded(each.time),
            "memory": _rounded(each.memory),
            "runs": [{name: _rounded(value) for name, value in asdict(run).items()} for run in each.runs],
        }
        for key, each in sorted(found.items())
    }
    heading = "# Written by `dslaunch calibrate`, from runs of this site; read by --config-dir.\n"
    body = {"schema": SCHEMA, "rates_sha256": rates_sha256, "corrections": rows}
    return heading + str(yaml.safe_dump(body, sort_keys=False, width=110))


def read(path: Path) -> tuple[str, dict[str, Correction]]:
    """(hash of the rates that are corrected, corrections by GPU/software).

    Raises:
        ConfigError: not what `dslaunch calibrate` writes.
    """
    raw = loaded(path)
    try:
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema is {raw['schema']!r}, read is {SCHEMA}")
        return str(raw["rates_sha256"]), {
            str(key): Correction(
                _factor(row, "time"), _factor(row, "memory"), tuple(Lesson(**run) for run in row["runs"])
            )
            for key, row in raw["corrections"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not as `dslaunch calibrate` writes it: {error}. Calibrate again, or take the file away."
        ) from error


def _factor(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 10:
        raise ValueError(f"{name} is {value!r}, where a factor from 0.1 to 10 belongs")
    return float(value)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
