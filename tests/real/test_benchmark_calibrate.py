"""Calibration finds rates that measurements speak for, and leaves the others; FLOPs are counted as sources do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.calibrate import calibrate
from benchmarks.flops_kinds import measured_step_s, step_flops
from benchmarks.records import Measured, Record, published
from benchmarks.settings import setting
from dslaunch.hardware.efficiency import UNCALIBRATED, faster
from dslaunch.plan.time import step_time

TRUE = replace(UNCALIBRATED, gpus={**UNCALIBRATED.gpus, "ampere": faster(UNCALIBRATED.gpus["ampere"], 0.85)})
"""Tables by which the runs of these tests are timed."""


def runs(of: str) -> list[Record]:
    """Published shapes with step times that `TRUE` gives them."""
    found = [r for r in published() if of in r.id and r.gpu.type == "A100-80GB" and r.quality == "A"][:40]
    return [r.model_copy(update={"id": f"{r.id}-timed", "measured": timed(r)}) for r in found]


def timed(record: Record) -> Measured:
    return Measured(step_time_s=step_time(setting(record).cases, TRUE).step_s)


def test_measurements_move_the_rates_that_they_depend_on() -> None:
    records = runs("foundry")
    tables = calibrate(records)

    def error(of: object) -> float:
        return max(
            abs(math.log(step_time(setting(r).cases, of).step_s / (r.measured.step_time_s or 0)))  # type: ignore[arg-type]
            for r in records
        )

    assert error(UNCALIBRATED) > 0.08
    assert error(tables) < 0.9 * error(UNCALIBRATED)
    assert tables.gpus["hopper"] == UNCALIBRATED.gpus["hopper"]
    assert tables.families["megatron"] == UNCALIBRATED.families["megatron"]


def test_without_measurements_the_priors_stand() -> None:
    assert calibrate([]).gpus["ampere"] == UNCALIBRATED.gpus["ampere"]


def by_id(name: str) -> Record:
    return next(record for record in published() if record.id == name)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "vocab", "batch"),
    [("megatron-sc21-t2-ptd-174.6b-g384", 96, 12288, 51200, 1536)],
)
def test_hardware_flops_are_those_of_megatrons_formula(
    name: str, layers: int, hidden: int, vocab: int, batch: int
) -> None:
    """96 B s L h^2 (1 + s/(6h) + V/(16hL)), arXiv:2104.04473."""
    record = by_id(name)
    case = setting(record).cases["llm"]
    bracket = 1 + 2048 / (6 * hidden) + vocab / (16 * hidden * layers)
    assert case.component.vocab == vocab  # type: ignore[union-attr]
    assert step_flops(record, case) == pytest.approx(
        96 * batch * 2048 * layers * hidden**2 * bracket, rel=1e-9
    )
    assert measured_step_s(record, case) == pytest.approx(
        step_flops(record, case) / ((record.measured.tflops_per_gpu or 0) * 1e12 * 384)
    )
