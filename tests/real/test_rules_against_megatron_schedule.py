"""What our rules say of Megatron's schedule, data and batch ramp-up, against megatron-core's own classes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.real.parts import need

need("megatron", "torch")

from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules.registry import rules  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402

SIZES = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 64"


def found(rule: str, flags: str) -> list[str]:
    """What one rule says of a command line of 8 ranks."""
    text = f"#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --lr 1e-4 {flags}\n"
    known = Settings(megatron_version="0.16.1", world_size=8)
    return [hit.message for hit in rules()[rule].check(None, read_fileset({"run.sh": text}), known)]


def drawn(chance: random.Random) -> dict[str, Any]:
    """Some of the flags of a schedule, with values that fit one another more often than not."""
    unit = chance.choice(["iters", "samples"])
    given: dict[str, Any] = {f"--train-{unit}": chance.choice([100, 1000])}
    more = {
        f"--lr-decay-{unit}": (80, 500, 0),
        f"--lr-warmup-{unit}": (0, 10, 79, 80, 100, 1000),
        "--lr-warmup-init": (0.0, 1e-5, 1e-3), "--min-lr": (0.0, 1e-5, -1e-6),
        "--lr-decay-style": ("cosine", "WSD"),
        f"--lr-wsd-decay-{unit}": (10, 50),
    }  # fmt: skip
    given |= {name: chance.choice(values) for name, values in more.items() if chance.random() < 0.4}
    if f"--lr-warmup-{unit}" not in given and chance.random() < 0.3:
        given["--lr-warmup-fraction"] = chance.choice([0.0, 0.01, 0.999, 1.0, 1.5])
    return given


def made(given: dict[str, Any]) -> None:
    """The scheduler as get_optimizer_param_scheduler of Megatron-LM makes it of these flags."""
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    unit = "iters" if "--train-iters" in given else "samples"
    each = 64 if unit == "iters" else 1
    whole = given[f"--train-{unit}"]
    decay = given.get(f"--lr-decay-{unit}", whole) * each
    share = given.get("--lr-warmup-fraction")
    settled = given.get(f"--lr-wsd-decay-{unit}")
    OptimizerParamScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4),  # type: ignore[arg-type]
        init_lr=given.get("--lr-warmup-init", 0.0), max_lr=1e-4, min_lr=given.get("--min-lr", 0.0),
        lr_warmup_steps=given.get(f"--lr-warmup-{unit}", 0) * each if share is None else share * decay,
        lr_decay_steps=decay, lr_decay_style=given.get("--lr-decay-style", "linear"), start_wd=0.01, end_wd=0.01,
        wd_incr_steps=whole * each, wd_incr_style="constant",
        wsd_decay_steps=None if settled is None else settled * each, lr_wsd_decay_style="exponential",
    )  # fmt: skip


def test_schedules_are_judged_as_megatron_judges_them() -> None:
    chance, seen = random.Random(7), [0, 0]
    for _ in range(500):
        given = drawn(chance)
        try:
            made(given)
            raised = None
        except AssertionError as error:
            raised = error
        said = found("megatron.schedule", " ".join(f"{name} {value}" for name, value in given.items()))
        assert bool(said) == (raised is not None), (given, said)
        seen[raised is not None] += 1
    print(f"{sum(seen)} schedules: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > 100


@pytest.mark.parametrize(
    ("paths", "split"),
    [
        (["a"], "949,50,1"), (["a", "b"], "99,1,0"), (["0.5", "a", "0.5", "b"], "99,1,0"),
        (["1", "a", "b", "c"], "9,1"), (["a"], "1,1,1,1"), (["1", "a", "2", "b"], "1,1,1,1"),
        (["a", "b", "c"], "1"), (["0.1", "a", "b", "0.2"], "8,1,1"), (["1", "a", "b"], "8,1,1"),
    ],
)  # fmt: skip
def test_sources_are_judged_as_megatron_judges_them(paths: list[str], split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        blend = get_blend_from_list(paths)
        parse_and_normalize_split(split)
        refused = blend is None or any(path.replace(".", "").isdigit() for path in blend[0])  # no such file
    except AssertionError:
        refused = True
    said = found("megatron.sources", f"--data-path {' '.join(paths)} --split {split}")
    assert bool(said) == refused, said


def test_ramp_ups_are_judged_as_megatron_judges_them() -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    chance, seen = random.Random(7), [0, 0]
    for _ in range(200):
        start, step = chance.choice([0, 4, 8, 16, 32, 64, 72]), chance.choice([0, 4, 8, 16])
        samples = chance.choice([0, 999, 999, 999])
        try:
            ramp = RampupBatchsizeNumMicroBatchesCalculator(64, 1, 8, False, 0, start, step, samples)
            for consumed in range(0, 1100, 50):
                ramp.update(consumed, True)
            raised = None
        except (AssertionError, ZeroDivisionError) as error:
            raised = error
        said = found("megatron.batch", f"--train-samples 9999 --rampup-batch-size {start} {step} {samples}")
        assert bool(said) == (raised is not None), (start, step, samples, said)
        seen[raised is not None] += 1
    print(f"{sum(seen)} ramp-ups: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > 10
