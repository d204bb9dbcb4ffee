"""Figures that sum up errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.errors import Error
from benchmarks.records import Record


@dataclass(frozen=True)
class Summary:
    """Of relative errors; all but the bias of their absolute values, as shares."""

    count: int
    median: float
    mean: float
    p90: float
    worst: float
    bias: float
    """Median of the signed errors."""


def summary(errors: Iterable[Error]) -> Summary | None:
    """None where there are no errors."""
    signed = [error.relative for error in errors]
    if not signed:
        return None
    sizes = sorted(abs(value) for value in signed)
    return Summary(
        len(signed), statistics.median(sizes), statistics.fmean(sizes), percentile(sizes, 0.9), sizes[-1],
        statistics.median(signed),
    )  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, interpolated."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def by(errors: Iterable[Error], key: Callable[[Record], str]) -> dict[str, list[Error]]:
    """Errors by a property of their record, the largest group first."""
    groups: dict[str, list[Error]] = {}
    for error in errors:
        groups.setdefault(key(error.record), []).append(error)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def over_sources(errors: Iterable[Error]) -> Summary | None:
    """Each figure taken per source, then averaged over sources, so that no large source hides the others."""
    found = [s for group in by(errors, source_of).values() if (s := summary(group))]
    if not found:
        return None
    return Summary(
        count=sum(s.count for s in found),
        median=statistics.fmean(s.median for s in found),
        mean=statistics.fmean(s.mean for s in found),
        p90=statistics.fmean(s.p90 for s in found),
        worst=max(s.worst for s in found),
        bias=statistics.fmean(s.bias for s in found),
    )


def source_of(record: Record) -> str:
    """The publication that a record stands in."""
    return record.source.title


def held_out_with(record: Record) -> str:
    """What is held out together: all that one repository or paper printed, since releases repeat runs."""
    return record.source.repo or record.source.title.split(",")[0]
