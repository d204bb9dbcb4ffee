"""What a run measured: metrics.jsonl, its state and its events, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dslaunch.planfile import Prediction
from dslaunch.run.lines import Lines, number
from dslaunch.run.state import State, read_events, read_state

CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "step_time_s": "seconds a step",
    "tokens_per_s": "tokens a second",
    "memory_gib": "GiB, peak so far",
}
"""Fields of metrics.jsonl that are drawn, with their titles."""
_NEEDED = {"step", "samples_per_s", "memory_kind", *CURVES}


@dataclass(frozen=True)
class Measured:
    """A run as its folder tells it."""

    state: State
    steps: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl: one a step, ascending; none where the program writes no such file."""
    events: tuple[dict[str, Any], ...]

    @property
    def settled(self) -> tuple[dict[str, Any], ...]:
        """The second half of the steps: start-up is over."""
        return self.steps[len(self.steps) // 2 :]

    def middle(self, field: str) -> float | None:
        """The median of a field over the settled steps; None where nothing was measured."""
        return median(row[field] for row in self.settled) if self.steps else None

    @property
    def last_loss(self) -> float | None:
        return float(self.steps[-1]["loss"]) if self.steps else None


def measured(folder: Path) -> Measured | None:
    """What the run in `folder` measured; None where it is no run.

    Raises:
        ConfigError: a state.json that can't be read.
    """
    if not (folder / "state.json").is_file():
        return None
    return Measured(read_state(folder), tuple(_steps(folder)), tuple(read_events(folder)))


def comparison(
    found: Measured, prediction: Prediction | None
) -> list[tuple[str, float | None, float | None]]:
    """(figure, predicted, measured): medians of the second half of the run, memory at its highest."""
    peak = max((float(row["memory_gib"]) for row in found.steps), default=None)
    kind = str(found.steps[-1]["memory_kind"]) if found.steps else ""
    predicted = prediction.allocated_gib if prediction and kind == "cuda_peak_allocated" else None
    step, tokens, samples = (
        (prediction.step_time_s, prediction.tokens_per_s, prediction.samples_per_s)
        if prediction
        else (None, None, None)
    )
    return [
        ("step, s", step, found.middle("step_time_s")),
        ("throughput, tokens/s", tokens, found.middle("tokens_per_s")),
        ("throughput, samples/s", samples, found.middle("samples_per_s")),
        (f"memory, GiB ({kind or 'not measured'})", predicted, peak),
    ]


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines that a crash cut off, and those of a program with other fields, are left out."""
    for row in Lines(folder / "metrics.jsonl").new():
        if row.keys() >= _NEEDED and all(_is_drawn(row, each) for each in CURVES):
            yield row


def _is_drawn(row: dict[str, Any], field: str) -> bool:
    """A step whose gradients overflowed has no norm."""
    return number(row[field]) is not None or (field == "grad_norm" and row[field] is None)


def event_rows(events: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(time, kind, details) of each event."""
    return [
        (
            str(event.get("time", "")),
            str(event.get("kind", "")),
            json.dumps(event.get("details", {}), ensure_ascii=False),
        )
        for event in events
    ]
