"""What was predicted against what was measured, like with like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.predict import Predicted
from benchmarks.records import Record
from benchmarks.settings import family_of, world_size

Kind = Literal["memory", "time"]
_GB_IN_GIB = 1e9 / 2**30


@dataclass(frozen=True)
class Error:
    """One figure of one record."""

    record: Record
    kind: Kind
    quantity: str
    """The figure that was printed: `allocated`, `reserved`, ... or `step_time_s`, `tflops_per_gpu`, ..."""
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
    """The figures that both have: memory, and the first that is printed of the speeds."""
    if predicted.refused is not None:
        return
    memory = measured_gib(record)
    if memory is not None and predicted.peak_memory_gib is not None:
        kind = record.measured.memory_class or "as_printed"
        yield Error(record, "memory", kind, predicted.peak_memory_gib, memory)
    if predicted.step_time_s is not None:
        found = _step_s(record, predicted)
        if found is not None:
            yield Error(record, "time", found[0], predicted.step_time_s, found[1])


def measured_gib(record: Record) -> float | None:
    """Peak memory in GiB (2**30 bytes), whatever unit was printed."""
    measured = record.measured
    if measured.peak_memory_gb is None:
        return None
    unit = (measured.peak_memory_unit or "GiB").strip('" ')
    decimal = unit.startswith("GB") and "MiB" not in unit
    return measured.peak_memory_gb * (_GB_IN_GIB if decimal else 1.0)


def _step_s(record: Record, predicted: Predicted) -> tuple[str, float] | None:
    """(which figure was printed, the step time that it means): predicted time times predicted over printed speed."""
    measured, step = record.measured, predicted.step_time_s
    assert step is not None
    if measured.step_time_s:
        return "step_time_s", measured.step_time_s
    gpus = world_size(record)
    speeds = {
        "tokens_per_sec_per_gpu": (measured.tokens_per_sec_per_gpu, predicted.tokens_per_s_per_gpu),
        "tflops_per_gpu": (measured.tflops_per_gpu, predicted.tflops_per_gpu),
        "samples_per_sec": (
            measured.samples_per_sec,
            predicted.tokens_per_s_per_gpu * gpus / record.seq_len
            if predicted.tokens_per_s_per_gpu and record.seq_len
            else None,
        ),
    }
    for name, (printed, foreseen) in speeds.items():
        if printed and foreseen:
            return name, step * foreseen / printed
    return None

