"""Predictions by tables to which the record's own repository or paper has contributed nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.calibrate import calibrate
from benchmarks.errors import Error, errors
from benchmarks.predict import Predicted, predict
from benchmarks.records import Record
from benchmarks.statistics import held_out_with


@dataclass(frozen=True)
class Held:
    """One record, and what was foreseen of it."""

    record: Record
    predicted: Predicted


def held_out(records: Sequence[Record]) -> list[Held]:
    """Every record, predicted from tables that were calibrated without its publisher."""
    return list(_held_out(records))


def _held_out(records: Sequence[Record]) -> Iterator[Held]:
    for publisher in dict.fromkeys(held_out_with(record) for record in records):
        own = [record for record in records if held_out_with(record) == publisher]
        tables = calibrate([record for record in records if held_out_with(record) != publisher])
        for record in own:
            yield Held(record, predict(record, tables))


def all_errors(held: Sequence[Held]) -> list[Error]:
    """Memory and time of every record that has both figures."""
    return [error for each in held for error in errors(each.record, each.predicted)]
