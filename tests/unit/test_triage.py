"""Verdicts from what a run and its repetition said, and the plan for one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.errors import ConfigError, PlanError
from dslaunch.flow import Request, configured, rendered
from dslaunch.launch.alone import planned_alone
from dslaunch.launch.twin import twins
from dslaunch.planfile import plan_from_json
from dslaunch.render.blueprint import BLUEPRINT
from dslaunch.run.checkpoints import SavedState, saved_before
from dslaunch.run.failure import Failure, Said, last_exception
from dslaunch.run.verdict import Repeated, judged


def _failure(step: int, *said: str) -> Failure:
    found = tuple(Said(*each.split(": ", 1)) for each in said)
    return Failure(step, found, tuple(range(len(found))))


@pytest.mark.parametrize(
    ("cause", "repeated", "findings", "place"),
    [
        ("program", Repeated("failed", _failure(3, "ValueError: row 7 is bad"), 1), (), "model_and_data"),
        ("program", Repeated("failed", _failure(9, "KeyError: 'x'"), 1), (), "model_and_data"),
        ("program", Repeated("failed", _failure(1, "ImportError: no module"), 1), (), "unclear"),
        ("program", Repeated("out of time", _failure(2), 143), (), "unclear"),
        ("communication", Repeated("passed", _failure(6), 143), (), "communication"),
        ("hang", Repeated("passed", _failure(6), 0), ("n2: version.torch: 2.1",), "environment"),
        ("gpu_fault", Repeated("passed", _failure(6), 143), (), "environment"),
    ],
)
def test_the_verdict_follows_from_both(
    cause: str, repeated: Repeated, findings: tuple[str, ...], place: str
) -> None:
    verdict = judged(cause, _failure(3, "ValueError: row 9 is bad"), repeated, findings)
    assert verdict.place == place
    assert verdict.why
    assert verdict.next


def test_the_last_exception_of_a_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Traceback\nKeyError: 'a'\nTraceback\n[rank1]: torch.OutOfMemoryError: 7 GiB\nbye\n")
    assert last_exception(log) == Said("OutOfMemoryError", "7 GiB")
    log.write_text("dslaunch.runtime: rank 3 on n1 failed while training step 5: FloatingPointError: nan\n")
    assert last_exception(log) == Said("FloatingPointError", "nan")
    log.write_text("all is well: no Error here\n")
    assert last_exception(log) == Said("")


def test_a_checkpoint_before_the_step_is_taken(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000004", "other"):
        (tmp_path / name).mkdir()
    found = saved_before(tmp_path, 4)
    assert isinstance(found, SavedState)
    assert found.path.name == "step-00000002"
    assert saved_before(tmp_path, 2) is None


def test_the_plan_for_one_process_keeps_the_order_of_the_samples() -> None:
    files = rendered(Request(("recipe=vla_tiny", "cluster=2x2xA100", "launcher=slurm"), None, (), ()))[2]
    plan = plan_from_json(files["plan.json"])
    alone = planned_alone(plan, files, Path(), None)
    assert (alone.plan.world_size, alone.plan.global_batch) == (1, plan.global_batch)
    assert alone.plan.training == plan.training
    assert alone.start == "the beginning"
    with pytest.raises(ConfigError, match=r"holds no blueprint\.json"):
        planned_alone(plan, {name: text for name, text in files.items() if name != BLUEPRINT}, Path(), None)


def test_a_large_models_twin_is_repeated_in_its_place() -> None:
    words = ("recipe=vla70b", "cluster=64xA100", "module=dslaunch.runtime", "data.path=a:b")
    config = configured(Request(words, None, (), ()))
    (twin,) = twins(config)
    large, small = config.model.components["llm"], twin.config.model.components["llm"]
    assert set(twin.config.model.components) == set(config.model.components)
    assert 16 * small.hidden <= large.hidden  # type: ignore[union-attr]
    assert small.vocab == large.vocab  # type: ignore[union-attr]
    files = rendered(Request(words, None, (), ()))[2]
    alone = planned_alone(plan_from_json(files["plan.json"]), files, Path(), None)
    assert "its twin of 1/" in alone.words
    assert alone.plan.components.keys() == {"vision_encoder", "projector", "llm"}


def test_a_large_model_of_a_script_does_not_fit() -> None:
    words = (
        "recipe=llama3_70b", "cluster=64xH100", "engine=torch", "strategy=fsdp2", "script=train.py",
        "strategy.llm.recompute=full",
    )  # fmt: skip
    files = rendered(Request(words, None, (), ()))[2]
    with pytest.raises(PlanError, match="one process of this machine cannot repeat it"):
        planned_alone(plan_from_json(files["plan.json"]), files, Path(), None)
