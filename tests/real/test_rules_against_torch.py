"""Arguments of optimizers and schedules: what the table takes, torch and DeepSpeed build and step, and no more."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dslaunch.rules.checking import check
from dslaunch.rules.deepspeed.torch_arguments import (
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    SCHEDULES,
    TORCH_SCHEDULES,
    Argument,
)
from tests.cases.load import Case, all_cases
from tests.real.parts import need

VALUES: list[Any] = [
    None, 0, 1, 2, -1, 0.0, 0.5, 1.0, 1.5, -0.5, "x", "", [], ["a"], [1], [0.1], [0.1, 0.2], [0.9, 0.99],
    [1.0, 0.9], [0.5, 1.2], [0.1, 0.2, 0.3], {}, {"a": 1}, "cos", "triangular", "min", "rel", [0, 0.9], [0.0, 0.9],
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


LOADERS = [case for case in all_cases() if case.rule == "script.loader"]


@pytest.mark.parametrize("case", LOADERS, ids=lambda case: case.name)
def test_torch_refuses_the_loaders_that_the_rule_tells_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case's script runs as it stands, with eight samples and two workers in place of what it leaves open."""
    need("deepspeed")
    told = any(found.rule == "script.loader" for found in check(None, case.fileset(), case.settings))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    known = {"data": range(8), "args": types.SimpleNamespace(workers=2)}
    with pytest.raises((ValueError, TypeError)) if told else contextlib.nullcontext():
        exec(case.files["train.py"], known)


OF_MODULES = ("script.attention-heads", "script.module-sizes", "script.parameter-twice")
MODULES = [case for case in all_cases() if case.rule in OF_MODULES]


@pytest.mark.parametrize("case", MODULES, ids=lambda case: f"{case.rule}: {case.name}")
def test_torch_refuses_the_modules_that_the_rules_tell_of(case: Case) -> None:
    """Each case's script makes its modules, and runs them forward, as it stands."""
    need("deepspeed")
    told = any(found.rule == case.rule for found in check(None, case.fileset(), case.settings))
    raised = (RuntimeError, AssertionError, ValueError)
    with pytest.raises(raised) if told else contextlib.nullcontext():
        exec(case.files["train.py"], {"__name__": "train"})


def test_a_seed_with_the_rank_in_it_shares_samples_out_unevenly() -> None:
    need("deepspeed")
    from torch.utils.data import DistributedSampler

    def shares(seeds: tuple[int, int]) -> list[int]:
        both = (DistributedSampler(range(8), 2, rank, seed=seed) for rank, seed in enumerate(seeds))
        return sorted(index for sampler in both for index in sampler)

    assert shares((42, 42)) == list(range(8))
    assert shares((0, 1)) != list(range(8))


def test_reentrant_recomputation_under_ddp(tmp_path: Path) -> None:
    """In a process of its own, which has its own process group."""
    need("deepspeed")
    script = tmp_path / "run.py"
    script.write_text(_REENTRANT)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    said = run.stdout.splitlines()
    assert len(said) == 3, run.stderr
    assert "Expected to mark a variable ready only once" in said[0]
    assert said[1:] == ["fine", "fine"]


_REENTRANT = """
import os
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs):
        return checkpoint(self.second, self.first(inputs), use_reentrant=True)


store = distributed.FileStore(os.path.join(os.path.dirname(__file__), "store"), 1)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
for options in ({"find_unused_parameters": True}, {"find_unused_parameters": True, "static_graph": True}, {}):
    model = DistributedDataParallel(Net(), **options)
    try:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        print("fine")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
