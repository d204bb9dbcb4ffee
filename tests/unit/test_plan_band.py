"""The error band of the memory ledger: within it a plan warns, beyond it a plan is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dslaunch.errors import PlanError
from dslaunch.flow import Request, configured, refusing
from dslaunch.hardware.efficiency import SHIPPED, UNCALIBRATED
from dslaunch.plan.planner import plan
from dslaunch.planfile import Band, Finding, Plan, Prediction, prediction_from_json, to_json
from dslaunch.review.lessons import kept_as

CONFIG = configured(Request(("recipe=vla70b", "cluster=64xA100"), None, (), ()))


def predicted(share: float, band: Band | None) -> Prediction:
    """The plan where it may use `share` of what it is predicted to need."""
    need = plan(CONFIG, UNCALIBRATED)[1].peak_memory_gib
    fraction = share * need / CONFIG.cluster.gpu.memory_gib
    goal = CONFIG.goal.model_copy(update={"memory_fraction": fraction})
    tables = replace(UNCALIBRATED, memory_bands={"torch": band} if band else {})
    return plan(CONFIG.model_copy(update={"goal": goal}), tables)[1]


def of_memory(prediction: Prediction) -> list[Finding]:
    return [finding for finding in prediction.findings if finding.rule == "memory.gpu"]


@pytest.mark.parametrize(
    ("share", "severity"),
    [(0.94, "error"), (0.96, "memory"), (1.0, "memory"), (1.07, "memory"), (1.09, None)],
)
def test_within_the_band_a_plan_warns_and_beyond_it_is_refused(share: float, severity: str | None) -> None:
    prediction = predicted(share, Band(0.95, 1.08))
    found = of_memory(prediction)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert bool(refusing(prediction.findings, ())) == (severity == "error")


def test_a_warning_gives_the_range_and_can_be_accepted() -> None:
    (finding,) = of_memory(predicted(0.99, Band(0.95, 1.08)))
    assert finding.message.startswith("may not fit: ")
    assert finding.fix.startswith("--accept memory.gpu")


def test_without_a_band_the_prediction_itself_decides() -> None:
    assert of_memory(predicted(0.999, None))[0].severity == "error"
    assert of_memory(predicted(1.001, None)) == []
    assert predicted(1.001, None).band == "band: none yet"


def test_the_prediction_says_its_band_and_survives_its_file() -> None:
    prediction = predicted(1.2, Band(0.95, 1.08))
    low, high = prediction.peak_memory_gib * 0.95, prediction.peak_memory_gib * 1.08
    assert prediction.band == f"band: memory {low:.1f} to {high:.1f} GiB (-5 % to +8 %)"
    assert prediction_from_json(to_json(prediction)) == prediction


@pytest.mark.parametrize(
    ("share", "verdict"), [(1.01, "fits"), (0.99, "warned"), (0.91, "warned"), (0.89, "refused")]
)
def test_a_search_warns_within_the_band_and_takes_least_memory_there(share: float, verdict: str) -> None:
    words = ("strategy.every.cp=1", "strategy.every.zero=3", "strategy.every.recompute=full")
    fixed = configured(
        Request(
            ("recipe=llama3_8b", "cluster=8xH100", "engine=deepspeed", "strategy=auto", *words), None, (), ()
        )
    )
    tables = replace(UNCALIBRATED, memory_bands={"transformers": Band(0.9, 1.1)})
    least = plan(
        fixed.model_copy(update={"goal": fixed.goal.model_copy(update={"name": "lowest_memory"})}), tables
    )[1]
    fraction = share * least.peak_memory_gib / fixed.cluster.gpu.memory_gib
    every = fixed.strategy.every.model_copy(update={"offload": "none"})
    narrow = fixed.model_copy(
        update={
            "goal": fixed.goal.model_copy(update={"memory_fraction": fraction}),
            "strategy": fixed.strategy.model_copy(update={"every": every}),
        }
    )
    if verdict == "refused":
        with pytest.raises(PlanError, match="none of"):
            plan(narrow, tables)
        return
    prediction = plan(narrow, tables)[1]
    assert prediction.peak_memory_gib == pytest.approx(least.peak_memory_gib)
    assert [finding.severity for finding in of_memory(prediction)] == ["memory"]
    assert prediction.search is not None
    assert prediction.search.goal.startswith("throughput: nothing fits") == (verdict == "warned")


def test_a_searched_prediction_survives_its_file() -> None:
    words = ("recipe=llama3_8b", "cluster=8xH100", "strategy=auto")
    prediction = plan(configured(Request(words, None, (), ())))[1]
    assert prediction.search is not None
    assert prediction_from_json(to_json(prediction)) == prediction


@pytest.mark.parametrize("program", ["script=train.py", "module=mine.train"])
def test_a_program_of_your_own_under_native_is_reckoned_as_under_deepspeed(program: str) -> None:
    """Its layers are not the runtime's: bands, rates and what is learned of runs are those of its kind."""
    words = ("recipe=llama3_8b", "cluster=8xH100", "strategy=zero1", "training.grad_accum_dtype=bf16")

    def said(*more: str) -> tuple[Plan, Prediction]:
        return plan(configured(Request((*words, *more), None, (), ())))

    (own, native), (_, deepspeed) = said("engine=native", program), said("engine=deepspeed", program)
    assert (native.time_band, native.memory_band) == (deepspeed.time_band, deepspeed.memory_band)
    one, other = (each.components["llm"][0].time_s["compute"] for each in (native, deepspeed))
    assert one == other
    assert kept_as(own, SHIPPED)[1] == "transformers"
    for runtime in ((), ("module=dslaunch.runtime",)):
        ours, prediction = said("engine=native", *runtime)
        assert prediction.time_band != native.time_band
        assert kept_as(ours, SHIPPED)[1] == "torch"
