"""What a run's own figures say while it trains: a breach of a threshold is an event with its likely causes."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dslaunch.planfile import Prediction, plan_from_json, prediction_from_json
from dslaunch.run.lines import Lines, number, row_of

_LOOK_EVERY_S = 5.0
_COMPUTING = ("compute", "recompute")
"""Terms of the time ledger."""
_FILES = ("metrics.jsonl", "checkpoints.jsonl")
_COUNTERS = "ranks/*.gpus"
"""What gpus.py tells of a host's GPUs."""
_SHARES = "profiles/**/*.share.json"
"""What profiled.py measured of a rank's communication."""


@dataclass(frozen=True)
class Threshold:
    """One figure that is watched; the fields are those of thresholds.yaml."""

    name: str
    figure: str
    steps: int
    causes: tuple[str, ...]
    source: str
    below: float | None = None
    above: float | None = None
    of_plan: float | None = None
    sigma: float | None = None
    median: bool = False
    deviation: bool = False

    def limits(self, before: deque[float], planned_step_s: float | None) -> tuple[float | None, float | None]:
        """The least and the most that the figure may be, after the values `before`; None is no limit."""
        if self.of_plan is not None:
            return None, planned_step_s * self.of_plan if planned_step_s else None
        if self.sigma is not None:
            if len(before) < self.steps:
                return None, None
            return None, statistics.fmean(before) + self.sigma * statistics.pstdev(before)
        return self.below, self.above


@dataclass(frozen=True)
class Breach:
    """A figure beyond its threshold."""

    threshold: Threshold
    step: int
    value: float
    limit: float
    where: str = ""
    """The host or rank that it is of; empty: the run."""

    def figures(self) -> dict[str, Any]:
        """For the event log."""
        causes = list(self.threshold.causes)
        place = {"where": self.where} if self.where else {}
        value, limit = (each if math.isfinite(each) else None for each in (self.value, self.limit))
        return {"step": self.step, "value": value, "limit": limit, **place, "likely": causes}

    @property
    def _figure(self) -> str:
        return f"{'the deviation of ' if self.threshold.deviation else ''}{self.threshold.figure}"

    def describe(self) -> str:
        """One line for the user."""
        side = "above" if self.value > self.limit else "below"
        beyond = "is no finite number" if not math.isfinite(self.value) else f"is {side} {self.limit:.4g}"
        where = f", {self.where}" if self.where else ""
        return (
            f"step {self.step}{where}: {self._figure} {self.value:.4g} {beyond} "
            f"({self.threshold.name}): {'; or '.join(self.threshold.causes)}"
        )


@functools.cache
def thresholds() -> tuple[Threshold, ...]:
    """As thresholds.yaml has them."""
    rows = yaml.safe_load((resources.files("dslaunch.run") / "thresholds.yaml").read_text(encoding="utf-8"))
    return tuple(Threshold(**{**row, "causes": tuple(row["causes"])}) for row in rows)


class Vitals:
    """The figures of one attempt from now on; what was written before serves as history."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        prediction = _prediction(run_dir)
        self._planned_step_s = _planned_step_s(prediction)
        self._computed_s = _computed_s(run_dir, prediction)
        self._files = [Lines(run_dir / name) for name in _FILES]
        self._values: dict[tuple[str, str], deque[float]] = {}
        """By threshold, and the host or rank that the figure is of."""
        self._standing: set[tuple[str, str]] = set()
        """Thresholds that are breached: each is told once, until the figure is back."""
        self._seen: dict[Path, int] = {}
        """Files that are replaced, and when the one that was read was written."""
        self._shares: dict[str, float] = {}
        """By rank, the share of its time in which it only communicated."""
        self._step = 0
        self.unseen: list[str] = []
        """What cannot be watched, in words; whoever tells it takes it out."""
        self._looked = time.monotonic()
        for row in self._new_rows():
            self._judge(row)

    def look(self) -> list[Breach]:
        """The new breaches; asked often, it looks now and then."""
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return []
        self._looked = time.monotonic()
        return [breach for row in self._new_rows() for breach in self._judge(row)]

    def _judge(self, row: dict[str, Any]) -> list[Breach]:
        step_time_s = number(row.get("step_time_s"))
        if self._computed_s and step_time_s:
            row = {**row, "scaling_efficiency": self._computed_s / step_time_s}
        figures = [(each, number(row.get(each.figure))) for each in thresholds()]
        found = [self._breach(each, value, row) for each, value in figures if value is not None]
        return [breach for breach in found if breach]

    def _breach(self, threshold: Threshold, figure: float, row: dict[str, Any]) -> Breach | None:
        """A breach that did not stand before this row."""
        where = str(row.get("where", ""))
        key = (threshold.name, where)
        values = self._values.setdefault(key, deque(maxlen=threshold.steps))
        least, most = threshold.limits(values, self._planned_step_s)
        if math.isfinite(figure):
            values.append(figure)
            if (threshold.median or threshold.deviation) and len(values) < threshold.steps:
                return None
            value = statistics.median(values) if threshold.median else figure
            value = statistics.pstdev(values) if threshold.deviation else value
            limit = least if least is not None and value < least else None
            limit = most if most is not None and value > most else limit
        else:
            value, limit = figure, math.nan
        known = key in self._standing
        (self._standing.add if limit is not None else self._standing.discard)(key)
        return None if limit is None or known else Breach(threshold, row["step"], value, limit, where)

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were added; a file that a resumed run cut is read on from its new end."""
        for row in (row for file in self._files for row in file.new()):
            step = number(row.get("step"))
            step = int(step) if step is not None and math.isfinite(step) else self._step
            self._step = max(self._step, step)
            yield {**row, "step": step}
        for path in (*self._run_dir.glob(_COUNTERS), *self._run_dir.glob(_SHARES)):
            yield from self._replaced(path)

    def _replaced(self, path: Path) -> Iterator[dict[str, Any]]:
        """What a file that is replaced says now, once."""
        try:
            written, text = path.stat().st_mtime_ns, path.read_bytes()
        except FileNotFoundError:  # a new attempt puts the records aside meanwhile
            return
        if self._seen.get(path) == written:
            return
        self._seen[path] = written
        row = row_of(text)
        if row and "unseen" in row:
            self.unseen.append(f"GPUs of {row['host']}: {row['unseen']}")
        elif row and "busy" in row:
            yield {"step": self._step, **_counted(row)}
        elif row:
            yield {"step": self._step, **row}
            yield from self._apart(row)

    def _apart(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """How far the ranks' shares lie apart: the one that waits least is the one that the others wait for."""
        self._shares[str(row["where"])] = float(row["communication_share"])
        least, most = (of(self._shares, key=self._shares.__getitem__) for of in (min, max))
        if least != most:
            yield {"step": self._step, "where": least, "share_apart": self._shares[most] - self._shares[least]}


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    """A host's figures: of the GPU with least to do, and of the fullest NVLinks."""
    shares = [each for each in row["nvlink_share"] if each is not None]
    busy = min(row["busy"])
    found = {row["counter"]: busy, "gpu_busy": busy, "slowed_gpus": len(row["slowed"]), "where": row["host"]}
    return {**found, "nvlink_share": max(shares)} if shares else found


def _prediction(run_dir: Path) -> Prediction | None:
    path = run_dir / "prediction.json"
    return prediction_from_json(path.read_text(encoding="utf-8"), str(path)) if path.exists() else None


def _planned_step_s(prediction: Prediction | None) -> float | None:
    """The upper end of the plan's band for a step, seconds; None where the plan has no band."""
    band = prediction.time_band if prediction else None
    return prediction.step_time_s * band.high if prediction and band else None


def _computed_s(run_dir: Path, prediction: Prediction | None) -> float:
    """What the busiest rank computes in a step by the plan, seconds; 0 on CPUs, of which that is not known."""
    path = run_dir / "plan.json"
    if prediction is None or not path.exists():
        return 0.0
    plan = plan_from_json(path.read_text(encoding="utf-8"), str(path))
    if plan.cluster.accelerator == "cpu":
        return 0.0
    by_rank: dict[int, float] = defaultdict(float)
    for name, stages in prediction.components.items():
        for stage, predicted in zip(plan.components[name].stages, stages, strict=True):
            seconds = sum(predicted.time_s.get(term, 0.0) for term in _COMPUTING)
            for rank in stage.ranks:
                by_rank[rank] += seconds
    return max(by_rank.values())
