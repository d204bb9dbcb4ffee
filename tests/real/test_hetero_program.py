"""`recipe=vla_tiny cluster=local strategy=hetero` as rendered: 8 ranks train, stop, resume, and end together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dslaunch.planfile import plan_from_json
from dslaunch.runtime.messages import step_of
from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import Outcome, run_ranks

need("torch", "deepspeed", "sklearn")

WORDS = ("recipe=vla_tiny", "cluster=local", "strategy=hetero", "training.optimizer.warmup_steps=1")
STEPS = 4
LIMIT_S = 240.0
"""Eight processes on two cores, beside other things."""


def run(folder: Path, *words: str) -> Outcome:
    files = rendered(*WORDS, f"training.steps={STEPS}", *words)
    return run_ranks(written(folder, files) / "plan.json", 8, LIMIT_S)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program") / "a user's run; echo"
    outcome = run(folder, "checkpoint.every=2")
    assert outcome.statuses == [0] * 8, outcome.output
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_is_the_large_plan_in_small() -> None:
    """The shape of vla70b on 64 GPUs: ZeRO stages, shards and stages of each component."""
    small, large = (
        plan_from_json(rendered(*words)["plan.json"], "plan.json")
        for words in (WORDS, ("recipe=vla70b", "cluster=64xA100"))
    )
    assert small.engine.name == large.engine.name == "native"
    for name, layout in large.components.items():
        twin = small.components[name]
        assert (twin.zero, twin.tp > 1, twin.pp > 1) == (layout.zero, layout.tp > 1, layout.pp > 1), name
    assert {name: twin.dp for name, twin in small.components.items()} == {
        "vision_encoder": 4, "projector": 8, "llm": 2,
    }  # fmt: skip


def test_it_learns(trained: Path) -> None:
    found = losses(trained)
    assert len(found) == STEPS
    assert found[-1] < 0.9 * found[0]


def test_what_is_read_is_told(trained: Path) -> None:
    """Each of these samples has an image."""
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert all(row["images_per_s"] == pytest.approx(row["samples_per_s"]) for row in rows)
    assert all(0 <= row["data_wait_s"] < row["step_time_s"] for row in rows)


def test_what_the_first_step_proved_is_said_once(trained: Path) -> None:
    said = "".join(log.read_text() for log in trained.glob("rank*.txt"))
    proved = "parameters equal on all their replicas, gradient norms equal, weights and optimizer states within "
    assert said.count(proved) == said.count("of the ledger's") == said.count("of the planned speed") == 1


def test_it_goes_on_exactly_where_a_checkpoint_was_written(trained: Path, tmp_path: Path) -> None:
    saved = trained / "checkpoints" / "step-00000002"
    assert {each.name for each in saved.iterdir()} == {
        "dslaunch.json", "files.json", "index.json", "plan.json", *(f"rank-{n:05d}.safetensors" for n in range(8))
    }  # fmt: skip
    outcome = run(tmp_path / "resumed", f"checkpoint.load={saved}")
    assert outcome.statuses == [0] * 8, outcome.output
    assert losses(tmp_path / "resumed") == losses(trained)[2:]


def test_it_goes_on_under_other_layouts(trained: Path, tmp_path: Path) -> None:
    """One pipeline stage, four replicas; a projector cut in two, with other ZeRO stages."""
    words = (
        f"checkpoint.load={trained / 'checkpoints' / 'step-00000002'}", "strategy.llm.pp=1", "strategy.llm.dp=4",
        "strategy.llm.zero=2", "strategy.vision_encoder.tp=1", "strategy.vision_encoder.dp=8",
        "strategy.vision_encoder.micro_batch=4",
    )  # fmt: skip
    outcome = run(tmp_path / "other", *words)
    assert outcome.statuses == [0] * 8, outcome.output
    told = "vision_encoder tp 2, dp 4, ZeRO-2; it goes on as native on 8 ranks: llm tp 2, dp 4, ZeRO-2; "
    assert told in outcome.output
    assert losses(tmp_path / "other") == pytest.approx(losses(trained)[2:], rel=1e-5)


@pytest.mark.slow
def test_interleaved_stages_zero_3_and_saves_in_the_background_train_alike(trained: Path, tmp_path: Path) -> None:
    """The first step's proof holds of them too, and each begins where another layout ended."""
    words = (
        "strategy.llm.vpp=2", "strategy.vision_encoder.zero=3", "strategy.projector.zero=3",
        "checkpoint.async=true", "checkpoint.every=2",
        f"checkpoint.load={trained / 'checkpoints' / 'step-00000002'}",
    )  # fmt: skip
    outcome = run(tmp_path / "other", *words)
    assert outcome.statuses == [0] * 8, outcome.output
    assert "weights and optimizer states within" in outcome.output
    assert losses(tmp_path / "other") == pytest.approx(losses(trained)[2:], rel=1e-5)
    back = run(tmp_path / "back", f"checkpoint.load={tmp_path / 'other' / 'checkpoints'}", "training.steps=6")
    assert back.statuses == [0] * 8, back.output


def test_one_failing_rank_ends_all(tmp_path: Path) -> None:
    """Rank 0 can't write its metrics, and the others wait for it."""
    files = rendered(*WORDS, f"training.steps={STEPS}")
    folder = written(tmp_path / "run", files)
    (folder / "metrics.jsonl").mkdir()
    outcome = run_ranks(folder / "plan.json", 8, LIMIT_S)
    assert outcome.statuses == [1] * 8
    assert re.search(r"rank 0 on \S+ failed while .*IsADirectoryError", outcome.output)
    assert re.search(r"rank 7 on \S+ failed while training step 1", outcome.output)


def test_the_page_shows_the_redistribution_of_this_plan() -> None:
    from dslaunch.runtime.drawing import mermaid, table

    page = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    step = step_of(plan_from_json(rendered(*WORDS)["plan.json"], "plan.json"))
    for shown in (table(step, 1, forward=True), table(step, 0, forward=False), mermaid(step)):
        assert shown in page
