"""What was predicted against what was measured, like with like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.flops_kinds import measured_step_s
from benchmarks.predict import Predicted
from benchmarks.records import Record
from benchmarks.settings import family_of, setting

Kind = Literal["memory", "time"]
_GB_IN_GIB = 1e9 / 2**30


@dataclass(frozen=True)
class Error:
    """One figure of one record."""

    record: Record
    kind: Kind
    quantity: str
    """Which figure it is: `allocated`, `reserved`, `nvidia_smi`, `as_printed`, or `step time`."""
    predicted: float
    measured: float
    """GiB, or seconds of a step: other speeds are turned into the step time that they mean."""

    @property
    def relative(self) -> float:
        """predicted / measured - 1: above 0 where too much memory or too slow a step is predicted."""
        return self.predicted / self.measured - 1

    @property
    def family(self) -> str:
        """Whose layers ran: what bands are kept by."""
        return family_of(self.record)


def errors(record: Record, predicted: Predicted) -> Iterator[Error]:
    """The figures that both have: memory, and the step time that the printed speed means."""
    if predicted.refused is not None:
        return
    memory = measured_gib(record)
    if memory is not None and predicted.peak_memory_gib is not None:
        kind = record.measured.memory_class or "as_printed"
        yield Error(record, "memory", kind, predicted.peak_memory_gib, memory)
    step = measured_step_s(record, next(iter(setting(record).cases.values())))
    if step is not None and predicted.step_time_s is not None:
        yield Error(record, "time", "step time", predicted.step_time_s, step)


def measured_gib(record: Record) -> float | None:
    """Peak memory in GiB (2**30 bytes), whatever unit was printed."""
    measured = record.measured
    if measured.peak_memory_gb is None:
        return None
    unit = (measured.peak_memory_unit or "GiB").strip('" ')
    decimal = unit.startswith("GB") and "MiB" not in unit
    return measured.peak_memory_gb * (_GB_IN_GIB if decimal else 1.0)
