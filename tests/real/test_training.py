"""dslaunch.runtime for real: processes on the CPU, gloo between them, torch and DeepSpeed as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslaunch.planfile import FilesPlan, Plan
from dslaunch.run.agent import free_port
from tests.real import plans
from tests.real.parts import need
from tests.real.ranks import Outcome, run_ranks

need("torch", "deepspeed", "sklearn")

STRATEGIES = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "zero3_cpu_offload")
STEPS = 6
SAVED_AT = 3
FP32 = 1e-5
"""Relative; the same sums in another order: 3e-7 was seen over six steps."""
BF16 = 1e-2
"""Relative; each strategy rounds in other places: 3e-3 was seen over six steps."""

FROZEN_TOWER: dict[str, Any] = {
    **plans.MODEL,
    "components": {**plans.MODEL["components"], "vision_encoder": {**plans.VISION, "train": "nothing"}},
}

Rows = list[dict[str, Any]]
Curves = Callable[[str], Path]


def slow(*values: Any) -> Any:
    """A case for `make test-full` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rows_in(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows]


def digits(**files: Any) -> FilesPlan:
    return FilesPlan(data_path="digits", **files)


def run(plan: Plan, folder: Path) -> Outcome:
    return run_ranks(plans.write(plan, folder), plan.world_size)


def train(plan: Plan, folder: Path) -> Rows:
    """Run `plan` in `folder` to its end; the metrics."""
    outcome = run(plan, folder)
    assert outcome.statuses == [0] * plan.world_size, outcome.output
    return rows_in(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """The folder of a run of each strategy, trained when first asked for, with a checkpoint half way."""
    root = tmp_path_factory.mktemp("curves")

    def folder_of(strategy: str) -> Path:
        folder = root / strategy
        if not folder.exists():
            training = plans.training_plan(STEPS)
            train(plans.plan_for(strategy, training=training, files=digits(checkpoint_every=SAVED_AT)), folder)
        return folder

    return folder_of


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_strategy_trains_the_same_model_to_the_same_curve(strategy: str, trained: Curves) -> None:
    expected, found = rows_in(trained("ddp")), rows_in(trained(strategy))
    assert len(found) == STEPS
    for key in ("loss", "grad_norm", "lr"):
        assert values(found, key) == pytest.approx(values(expected, key), rel=FP32), key


def test_the_curve_does_not_depend_on_the_number_of_ranks(trained: Curves, tmp_path: Path) -> None:
    alone = train(plans.plan_for("zero2", world_size=1, training=plans.training_plan(STEPS)), tmp_path)
    assert values(alone, "loss") == pytest.approx(values(rows_in(trained("ddp")), "loss"), rel=FP32)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2"), "zero2", slow("zero3")])
def test_bf16_follows_fp32(strategy: str, trained: Curves, tmp_path: Path) -> None:
    rows = train(plans.plan_for(strategy, training=plans.training_plan(STEPS, "bf16")), tmp_path)
    losses, exact = values(rows, "loss"), values(rows_in(trained("ddp")), "loss")
    assert losses == pytest.approx(exact, rel=BF16)
    assert losses != pytest.approx(exact, rel=FP32 / 10), "it ran in fp32"


@pytest.mark.parametrize(
    ("strategy", "recompute"), [("ddp", "full"), slow("zero3", "full"), ("zero2", "selective")]
)
def test_recompute_changes_nothing(strategy: str, recompute: str, trained: Curves, tmp_path: Path) -> None:
    plan = plans.plan_for(strategy, training=plans.training_plan(STEPS))
    for name in ("vision_encoder", "llm"):
        plan = plans.with_component(plan, name, recompute=recompute)
    assert values(train(plan, tmp_path), "loss") == pytest.approx(
        values(rows_in(trained("ddp")), "loss"), rel=FP32
    )


@pytest.mark.parametrize("strategy", ["zero2", slow("fsdp2")])
def test_a_frozen_tower_and_rates_per_component(strategy: str, trained: Curves, tmp_path: Path) -> None:
    """Both strategies have three groups of parameters, or two where the tower is frozen."""
    results = []
    for which in ("ddp", strategy):
        plan = plans.plan_for(which, training=plans.training_plan(STEPS), model=FROZEN_TOWER)
        plan = plans.with_component(plan, "projector", lr=1e-2, weight_decay=0.0)
        results.append(values(train(plan, tmp_path / which), "loss"))
    assert results[1] == pytest.approx(results[0], rel=FP32)
    assert results[0] != pytest.approx(values(rows_in(trained("ddp")), "loss"), rel=1e-3)


@pytest.mark.parametrize(
    "strategy", ["fsdp2", "zero1", "zero3", slow("ddp"), slow("zero2"), slow("zero3_cpu_offload")]
)
def test_a_resumed_run_is_the_run_that_never_stopped(strategy: str, trained: Curves, tmp_path: Path) -> None:
    whole = trained(strategy)
    saved = whole / "checkpoints" / f"step-{SAVED_AT:08d}"
    files = digits(checkpoint_load=str(saved))
    rest = train(plans.plan_for(strategy, training=plans.training_plan(STEPS), files=files), tmp_path)
    for key in ("step", "loss", "grad_norm", "lr"):
        assert values(rest, key) == values(rows_in(whole), key)[SAVED_AT:], key


def test_a_run_goes_on_in_its_own_folder(trained: Curves, tmp_path: Path) -> None:
    """`latest` names the checkpoint, and metrics.jsonl holds each step once."""
    folder = tmp_path / "run"
    train(plans.plan_for("ddp", training=plans.training_plan(STEPS), files=digits(checkpoint_every=2)), folder)
    (folder / "checkpoints" / "latest").write_text("step-00000002\n")
    files = digits(checkpoint_load=str(folder / "checkpoints"))
    rows = train(plans.plan_for("ddp", training=plans.training_plan(STEPS), files=files), folder)
    assert values(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert values(rows, "loss") == values(rows_in(trained("ddp")), "loss")
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000006\n"


def test_a_finished_run_has_nothing_left_to_train(trained: Curves, tmp_path: Path) -> None:
    files = digits(checkpoint_load=str(trained("ddp") / "checkpoints"))
    outcome = run(plans.plan_for("ddp", training=plans.training_plan(STEPS), files=files), tmp_path)
    assert outcome.statuses == [0, 0]
    assert "the checkpoint is at step 6 of 6: nothing to train" in outcome.output


@pytest.mark.parametrize(("before", "strategy", "ranks"), [("zero1", "fsdp2", 1), slow("ddp", "zero3", 4)])
def test_another_strategy_on_other_ranks_goes_on(
    before: str, strategy: str, ranks: int, trained: Curves, tmp_path: Path
) -> None:
    whole = trained(before)
    files = digits(checkpoint_load=str(whole / "checkpoints" / f"step-{SAVED_AT:08d}"))
    plan = plans.plan_for(strategy, ranks, plans.training_plan(STEPS), files=files)
    rest = train(plan, tmp_path)
    for key in ("step", "loss", "grad_norm", "lr"):
        assert values(rest, key) == pytest.approx(values(rows_in(whole), key)[SAVED_AT:], rel=FP32), key


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2", "zero3"])
def test_a_tower_that_is_frozen_later_keeps_what_it_learnt(strategy: str, trained: Curves, tmp_path: Path) -> None:
    """The first loss behind the break is that of the weights that were saved; then the two part."""
    files = digits(checkpoint_load=str(trained("zero1") / "checkpoints" / f"step-{SAVED_AT:08d}"))
    training = plans.training_plan(STEPS)
    rest = train(plans.plan_for(strategy, training=training, model=FROZEN_TOWER, files=files), tmp_path)
    unbroken = values(rows_in(trained("zero1")), "loss")[SAVED_AT:]
    assert values(rest, "loss")[0] == pytest.approx(unbroken[0], rel=FP32)
    assert values(rest, "loss")[-1] != pytest.approx(unbroken[-1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_tower_that_trains_later_starts_as_it_was(strategy: str, tmp_path: Path) -> None:
    """A checkpoint leaves out what is frozen: it follows from the seed, and another one is refused."""
    training = plans.training_plan(STEPS)
    frozen = plans.plan_for(
        "zero2", training=training, model=FROZEN_TOWER, files=digits(checkpoint_every=SAVED_AT)
    )
    whole = train(frozen, tmp_path / "frozen")
    files = digits(checkpoint_load=str(tmp_path / "frozen" / "checkpoints" / f"step-{SAVED_AT:08d}"))
    plan = plans.plan_for(strategy, training=training, files=files)
    rest = train(plan, tmp_path / "rest")
    assert values(rest, "loss")[0] == pytest.approx(values(whole, "loss")[SAVED_AT], rel=FP32)
    assert values(rest, "grad_norm")[0] > values(whole, "grad_norm")[SAVED_AT]
    outcome = run(replace(plan, training=replace(training, seed=8)), tmp_path / "other seed")
    assert outcome.statuses == [2, 2]
    assert "follow from training.seed=7; this plan has training.seed=8" in outcome.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": 96}, "the model of this plan"),
        ({"layers": 3}, "the checkpoint has no parameter parts.llm.blocks.2.attention.key.weight"),
        ({"layers": 1}, "the model of this plan has no parameter parts.llm.blocks.1.attention.key.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    change: dict[str, Any], message: str, trained: Curves, tmp_path: Path
) -> None:
    model = {**plans.MODEL, "components": {**plans.MODEL["components"], "llm": {**plans.LLM, **change}}}
    files = digits(checkpoint_load=str(trained("zero1") / "checkpoints"))
    outcome = run(plans.plan_for("zero1", files=files, model=model), tmp_path)
    assert outcome.statuses == [2, 2]
    assert "checkpoint.load" in outcome.output
    assert outcome.output.count(message) == len(outcome.statuses), "whichever ends first has said it"
    assert "Traceback" not in outcome.output


def test_the_deepspeed_launcher_trains(tmp_path: Path) -> None:
    """The real launcher, in a folder with a space and a quote; what a user gets: lines, metrics, checkpoint."""
    folder = tmp_path / "a user's run; echo"
    plan = plans.plan_for("zero1", training=plans.training_plan(steps=24))
    done = subprocess.run(
        [
            sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2",
            "--master_port", str(free_port()), "--module", "dslaunch.runtime",
            "--plan", plans.write(plan, folder / "plan"),
        ],
        env={
            **os.environ, "DSLAUNCH_RUN_DIR": str(folder / "out"), "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "PYTHONPATH": os.getcwd(),
        },
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_in(folder / "out")
    assert len(re.findall(r"step \d+/24  loss \d", done.stdout)) == len(rows) == 24
    losses = values(rows, "loss")
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert values(rows, "tokens_per_s") == pytest.approx([28 * row["samples_per_s"] for row in rows])
    assert all(0 < row["memory_gib"] < 16 and row["memory_kind"] == "host_peak_rss" for row in rows)
    assert list((folder / "out" / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "out" / "checkpoints" / "latest").read_text() == "step-00000024\n"


def test_a_layout_per_component_is_refused_by_name(tmp_path: Path) -> None:
    plan = plans.with_component(plans.plan_for("zero2"), "llm", tp=2, dp=1, zero=1, micro_batch=8)
    outcome = run(plan, tmp_path)
    assert outcome.statuses == [2, 2]
    assert outcome.output.count("components.llm: its layout is TP2 PP1 DP1 ZeRO-1") == len(outcome.statuses)
    assert "strategy=ddp, fsdp2, zero1" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": FilesPlan(data_path="digitz")}, "data.path: found 'digitz'; dslaunch.runtime reads `digits`"),
        ({"files": digits(weights="llama.safetensors")}, "model.weights: found 'llama.safetensors'"),
        ({"files": digits(tokenizer="gpt2")}, "data.tokenizer: found 'gpt2'"),
        ({"files": digits(checkpoint_load="nowhere")}, "checkpoint.load: no checkpoint in nowhere"),
        ({"world_size": 4}, "components.llm: its layout is TP1 PP1 DP2"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    outcome = run_ranks(plans.write(replace(plans.plan_for("zero1"), **change), tmp_path), 2)
    assert outcome.statuses == [2, 2]
    assert outcome.output.count(message) == len(outcome.statuses)
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_one_failing_rank_ends_the_job(strategy: str, tmp_path: Path) -> None:
    """Rank 0 can't write its metrics; rank 1 is in a collective by then."""
    (tmp_path / "metrics.jsonl").mkdir()
    outcome = run(plans.plan_for(strategy), tmp_path)
    assert outcome.statuses == [1, 1]
    assert re.search(r"dslaunch.runtime: rank 0 on \S+ failed while .*IsADirectoryError", outcome.output)
    assert re.search(r"dslaunch.runtime: rank 1 on \S+ failed while training step 1", outcome.output)
