"""Learning rates step by step: what is rendered, followed by each framework's own schedule, is the plan's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from dslaunch.planfile import TrainingPlan
from dslaunch.runtime.schedule import lr_factor
from tests.golden.cases import planned, rendered
from tests.real.parts import need

need("torch")

import torch  # noqa: E402

STEPS, PEAK = 40, 1e-3
MODEL = ["recipe=llama3_8b", "cluster=8xH100", "data.tokenizer=/t", "data.path=/d"]
MODEL += [f"training.steps={STEPS}", f"training.optimizer.lr={PEAK}"]
SHAPES = ("linear", "cosine", "sqrt")


def words(**optimizer: object) -> list[str]:
    return [*MODEL, *(f"training.optimizer.{key}={value}" for key, value in optimizer.items())]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=PEAK)


def followed(make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """The rate of each step: a schedule moves on after the optimizer."""
    adam = optimizer()
    schedule, rates = make(adam), []
    for _ in range(STEPS):
        rates.append(float(adam.param_groups[0]["lr"]))
        adam.step()
        schedule.step()
    return rates


def wanted(training: TrainingPlan) -> list[float]:
    return [PEAK * lr_factor(step, training, PEAK) for step in range(STEPS)]


@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
def test_deepspeeds_line_without_warm_up(min_lr: float) -> None:
    """The first step stands at min_lr, and the others are a straight line down from the peak."""
    need("deepspeed")
    from deepspeed.runtime.lr_schedules import OneCycle

    typed = words(schedule="linear", warmup_steps=0, min_lr=min_lr)
    text = rendered(*typed, "engine=deepspeed", "strategy=zero2", "script=t.py")["ds_config.json"]
    block = json.loads(text)["scheduler"]
    assert block["type"] == "OneCycle"
    rates = followed(lambda adam: OneCycle(adam, **block["params"]))
    line = [PEAK - (PEAK - min_lr) * step / (STEPS - 1) for step in range(STEPS - 1)]
    assert rates == pytest.approx([min_lr, *line])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_trainers_stable_schedule(shape: str) -> None:
    need("transformers")
    from transformers import get_scheduler

    typed = words(schedule="wsd", warmup_steps=0, decay_steps=10, decay_shape=shape, min_lr=1e-4)
    made = [*typed, "engine=deepspeed", "strategy=zero2", "script=t.py", "engine.huggingface=true"]
    arguments = json.loads(rendered(*made)["hf_args.json"])
    training = planned(*made)[0].training
    rates = followed(
        lambda adam: get_scheduler(
            arguments["lr_scheduler_type"], adam, arguments["warmup_steps"], arguments["max_steps"],
            scheduler_specific_kwargs=arguments["lr_scheduler_kwargs"],
        )
    )  # fmt: skip
    assert rates == pytest.approx(wanted(training))
    assert rates[30] == PEAK > rates[31] > rates[39] > 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_megatrons_stable_schedule(shape: str) -> None:
    """Its warm-up is a step late: the first step has rate 0."""
    need("megatron")
    core = importlib.import_module("megatron.core.optimizer_param_scheduler")

    typed = words(schedule="wsd", warmup_steps=5, decay_steps=10, decay_shape=shape, min_lr=1e-4)
    made = [*typed, "engine=megatron", "strategy=zero1", "engine.path=/opt/Megatron-LM"]
    lines = dict(line.split(" ", 1) for line in rendered(*made)["megatron_args.txt"].splitlines() if " " in line)
    training = planned(*made)[0].training

    class Iterated:
        """Megatron counts samples; here a step is one."""

        def __init__(self, adam: torch.optim.Optimizer) -> None:
            self.own = core.OptimizerParamScheduler(
                adam, init_lr=0.0, max_lr=float(lines["--lr"]), min_lr=float(lines["--min-lr"]),
                lr_warmup_steps=int(lines["--lr-warmup-iters"]), lr_decay_steps=int(lines["--lr-decay-iters"]),
                lr_decay_style=lines["--lr-decay-style"], start_wd=0.1, end_wd=0.1, wd_incr_steps=STEPS,
                wd_incr_style="constant", wsd_decay_steps=int(lines["--lr-wsd-decay-iters"]),
                lr_wsd_decay_style=lines["--lr-wsd-decay-style"],
            )  # fmt: skip

        def step(self) -> None:
            self.own.step(increment=1)

    rates = followed(Iterated)
    assert rates[5:] == pytest.approx([PEAK, *wanted(training)[6:]])
    assert rates[:5] == pytest.approx([PEAK * step / 5 for step in range(5)])
