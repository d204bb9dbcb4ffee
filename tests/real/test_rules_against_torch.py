"""Arguments of optimizers and schedules: what the table takes, torch and DeepSpeed build and step, and no more."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from dslaunch.rules.torch_arguments import OPTIMIZERS, OWN_OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES, Argument
from tests.real.parts import need

VALUES: list[Any] = [
    None, 0, 1, 2, -1, 0.0, 0.5, 1.0, 1.5, -0.5, "x", "", [], ["a"], [1], [0.1], [0.1, 0.2], [0.9, 0.99],
    [1.0, 0.9], [0.5, 1.2], [0.1, 0.2, 0.3], {}, {"a": 1}, "cos", "triangular", "min", "rel",
]  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": 10}, "CosineAnnealingWarmRestarts": {"T_0": 10},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2}, "ExponentialLR": {"gamma": 0.9},
    "MultiStepLR": {"milestones": [1]}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "StepLR": {"step_size": 1}, "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupDecayLR": {"total_num_steps": 10, "warmup_num_steps": 2},
    "WarmupCosineLR": {"total_num_steps": 100, "warmup_num_steps": 50},
}  # fmt: skip
APART = {
    ("OneCycleLR", "total_steps", "null"): "epochs and steps_per_epoch then count",
    ("Rprop", "etas", "[0.1, 0.2]"): "one below and one above 1",
    ("Rprop", "etas", "[0.9, 0.99]"): "the same",
    ("Rprop", "etas", "[1.0, 0.9]"): "the same",
    ("OneCycleLR", "total_steps", "1"): "the third step is one too many",
    **{
        (name, key, value): "a momentum of 1, which AdamW divides by"
        for name, key in (
            ("CyclicLR", "max_momentum"), ("OneCycle", "cycle_min_mom"), ("OneCycleLR", "max_momentum"),
        )
        for value in ("1", "1.0", "[1]")
    },
}
"""What an argument's own type and range don't tell."""


@pytest.mark.parametrize("name", sorted({**OPTIMIZERS, **TORCH_SCHEDULES, **SCHEDULES}))
def test_the_table_takes_what_the_class_takes(name: str) -> None:
    need("deepspeed")
    arguments = {**OPTIMIZERS, **TORCH_SCHEDULES, **SCHEDULES}[name]
    made = _class(name)
    assert _keywords(made) == set(arguments)
    assert not _compared(name, arguments)


@pytest.mark.parametrize("name", sorted(OWN_OPTIMIZERS))
def test_the_table_has_the_arguments_of_deepspeeds_own_class(name: str) -> None:
    need("deepspeed")
    unnamed = {"model_params"} | ({"max_grad_norm"} if name == "FusedLamb" else set())
    assert _keywords(_class(name)) - unnamed == set(OWN_OPTIMIZERS[name])


@pytest.mark.slow  # each operator is compiled first
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam"])
def test_the_table_takes_what_deepspeeds_own_class_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("deepspeed")
    import cpuinfo
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        pytest.skip("the classes would compile for this machine's accelerator")
    monkeypatch.setattr(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info))
    assert not _compared(name, OWN_OPTIMIZERS[name])


def _compared(name: str, arguments: Mapping[str, Argument]) -> list[str]:
    wrong = []
    for key, argument in arguments.items():
        for value in VALUES if argument.kind != "any" else ():
            several = argument.kind == "rate" and isinstance(value, list) and len(value) > 1
            if several or (name, key, json.dumps(value)) in APART:
                continue
            raised = _raised(name, {**NEEDED.get(name, {}), key: value})
            if argument.takes(value) != (raised is None):
                wrong.append(f"{key}={value!r}: {raised!r}")
    return wrong


def _class(name: str) -> Any:
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime import lr_schedules

    if name in OWN_OPTIMIZERS:
        return next(getattr(module, name) for module in (adam, adagrad, lion, lamb) if hasattr(module, name))
    if name in OPTIMIZERS:
        return getattr(torch.optim, name)
    return getattr(torch.optim.lr_scheduler if name in TORCH_SCHEDULES else lr_schedules, name)


def _keywords(made: Any) -> set[str]:
    return set(inspect.signature(made.__init__).parameters) - {"self", "params", "optimizer"}


def _raised(name: str, params: dict[str, Any]) -> Exception | None:
    """What is raised where the class is built and stepped twice, as DeepSpeed's engine does it."""
    import torch

    model = torch.nn.Linear(2, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name in OPTIMIZERS or name in OWN_OPTIMIZERS:
                optimizer, schedule = _class(name)(model.parameters(), **params), None
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                schedule = _class(name)(optimizer, **params)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                if schedule is not None:
                    _step(schedule)
    except Exception as error:
        return error
    return None


def _step(schedule: Any) -> None:
    try:
        schedule.step()
    except TypeError:
        schedule.step(8)
