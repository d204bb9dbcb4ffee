"""What the first steps are held to: bounds, words, and where there is nothing to be held to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.golden.cases import rendered

pytest.importorskip("torch")

from dslaunch.planfile import Plan, Prediction, plan_from_json, prediction_from_json
from dslaunch.runtime.pace import DEFAULT, bound_of, compared

GPUS = ("recipe=vla70b", "cluster=64xA100")
CPUS = ("recipe=vla_tiny", "cluster=local", "strategy=hetero")


def planned(*words: str) -> tuple[Plan, Prediction]:
    files = rendered(*words)
    return plan_from_json(files["plan.json"]), prediction_from_json(files["prediction.json"])


def test_on_gpus_the_bound_is_half_of_the_slow_end_of_the_band() -> None:
    plan, prediction = planned(*GPUS)
    assert prediction.time_band
    assert bound_of(plan, prediction)[0] == DEFAULT / prediction.time_band.high < DEFAULT


def test_a_given_bound_is_taken_on_cpus_too() -> None:
    assert bound_of(*planned(*CPUS, "watchdog.min_speed=0.7")) == (0.7, "watchdog.min_speed")


@pytest.mark.parametrize(
    ("words", "why"),
    [((*GPUS, "watchdog.min_speed=0"), "watchdog.min_speed is 0"), (CPUS, "ranks share a host's cores")],
)
def test_where_there_is_no_bound_it_is_said_why(words: tuple[str, ...], why: str) -> None:
    bound, said = bound_of(*planned(*words))
    assert (bound, said[: len(why)]) == (0.0, why)


def test_a_time_without_a_band_is_nothing_to_be_held_to() -> None:
    plan, prediction = planned(*GPUS)
    bound, why = bound_of(plan, replace(prediction, time_band=None))
    assert bound == 0.0
    assert "no error band" in why


def test_on_gpus_the_scaling_efficiencies_are_said() -> None:
    """Of the busiest rank, which holds a part of each component: at the planned speed both are equal."""
    plan, prediction = planned(*GPUS)
    computed = sum(
        max(stage.time_s["compute"] + stage.time_s["recompute"] for stage in stages)
        for stages in prediction.components.values()
    )
    share = f"{computed / prediction.step_time_s:.0%}"
    said = compared(prediction.step_time_s, plan, prediction)
    assert said.endswith(f"100% of the planned speed (scaling efficiency {share}, planned {share})")
    assert "50% of the planned speed" in compared(2 * prediction.step_time_s, plan, prediction)
    assert "efficiency" not in compared(1.0, *planned(*CPUS))
