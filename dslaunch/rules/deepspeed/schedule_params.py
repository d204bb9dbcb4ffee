"""The parameters that a DeepSpeed JSON hands to its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslaunch.errors import listed, nearest
from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.deepspeed.optimizer_params import torch_class
from dslaunch.rules.deepspeed.schedules import schedule
from dslaunch.rules.deepspeed.torch_arguments import SCHEDULES, TORCH_SCHEDULES
from dslaunch.rules.deepspeed.values import is_text, shown
from dslaunch.rules.registry import Hit

_REQUIRED = {
    "CosineAnnealingLR": ("T_max",), "CosineAnnealingWarmRestarts": ("T_0",), "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",), "LambdaLR": ("lr_lambda",), "MultiStepLR": ("milestones",),
    "MultiplicativeLR": ("lr_lambda",), "OneCycleLR": ("max_lr",), "SequentialLR": ("schedulers", "milestones"),
    "StepLR": ("step_size",), "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}  # fmt: skip
"""Arguments without a default (torch 2.13, DeepSpeed 0.19.8); scheduler.warmup has those of the warm-ups."""
_OBJECTS = {"LambdaLR": "lr_lambda", "MultiplicativeLR": "lr_lambda", "SequentialLR": "schedulers"}
"""Functions and objects that JSON can't hold."""
_NO_MOMENTUM = frozenset({"Adagrad", "Adadelta", "Adafactor", "ASGD", "Rprop"})
_COSINE = "Give warmup_min_ratio and cos_min_ratio; the peak is the optimizer's lr."


@config_rule(
    "scheduler.params", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/engine.py _scheduler_from_config 0.19.8, run; "
    "deepspeed/runtime/lr_schedules.py 0.19.8, run; torch 2.13",
)  # fmt: skip
def bad_params(config: Config) -> Iterator[Hit]:
    """Parameters that are missing, that the schedule doesn't take, or with values that it can't work with."""
    name, params = schedule(config), config.get("scheduler.params")
    if name and not config.has("scheduler.params"):
        message = f"{name} without params: DeepSpeed raises TypeError, even where every one has a default."
        yield config.hit("scheduler", message, 'Write "params": {} and what the schedule needs.')
    if not isinstance(params, dict):
        return
    for key in (key for key in _REQUIRED.get(name, ()) if key not in params):
        message = f"{name} needs {key}: TypeError when the scheduler is built."
        yield config.hit("scheduler.params", message, f"Give {key}.")
    given = _OBJECTS.get(name, "")
    if given in params:
        message = f"{name}'s {given} is an object of Python's, which JSON can't hold: what stands here raises."
        yield config.hit(f"scheduler.params.{given}", message, "Make the scheduler in the script.")
    yield from _values(config, name, params)
    yield from _steps(config, name, params)
    yield from _one_cycle(config, name, params)


def _values(config: Config, name: str, params: dict[str, Any]) -> Iterator[Hit]:
    """Names and values that the schedule doesn't take."""
    arguments = SCHEDULES.get(name) or TORCH_SCHEDULES.get(name) or {}
    for key, value in params.items() if arguments else ():
        path, argument = f"scheduler.params.{key}", arguments.get(key)
        if argument is None:
            message = f"{name} takes no '{key}': TypeError when the scheduler is built.{nearest(key, arguments)}"
            fix = _COSINE if name == "WarmupCosineLR" else f"Use {listed(sorted(arguments))}."
            yield config.hit(path, message, fix)
        elif _unread(name, key, params):
            continue
        elif is_text(value) and argument.kind in ("number", "rate") and not argument.takes(value):
            message = f"'{key}' is {shown(value)}, a text: TypeError when the scheduler is built."
            yield config.hit(path, message, "Write the number without quotes.")
        elif not argument.takes(value):
            message = f"'{key}' is {shown(value)}; {name} takes {argument.words}, and raises."
            yield config.hit(path, message, f"Write {argument.words}.")
        elif argument.kind == "rate" and isinstance(value, list) and len(value) > 1:
            message = f"'{key}' has {len(value)} rates: ValueError unless the script has as many parameter groups."
            fix = "Write one number; model.parameters() is one group."
            yield config.hit(path, message, fix, severity="info", raised_by="nobody")


def _unread(name: str, key: str, params: dict[str, Any]) -> bool:
    """Whether another parameter keeps this one from being read, or from being checked."""
    if key in ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "base_momentum", "max_momentum"):
        return not bool(params.get("cycle_momentum", True))
    first = params.get("warmup_num_steps", 1000) == 1
    return name == "WarmupCosineLR" and key == "warmup_min_ratio" and bool(first)


def _steps(config: Config, name: str, params: dict[str, Any]) -> Iterator[Hit]:
    """Sizes of OneCycle's and LRRangeTest's steps."""
    if not config.at_least("0.19.4"):
        return
    positive = {"OneCycle": "cycle_first_step_size", "LRRangeTest": "lr_range_test_step_size"}.get(name, "")
    size = 0 if params.get(positive) is False else config.number(f"scheduler.params.{positive}")
    if positive and size is not None and size <= 0:
        message = f"{positive} is {size:g}; DeepSpeed raises ValueError for what isn't above 0."
        yield config.hit(f"scheduler.params.{positive}", message, "Write a number of steps.")
    elif name == "LRRangeTest" and positive in params and not isinstance(params[positive], int):
        message = f"{positive} is {shown(params[positive])}, no whole number; DeepSpeed raises ValueError."
        yield config.hit(f"scheduler.params.{positive}", message, "Write a number of steps.")
    second = config.number("scheduler.params.cycle_second_step_size") if name == "OneCycle" else None
    if second is not None and second < 0:
        message = f"cycle_second_step_size is {second:g}; DeepSpeed raises ValueError below 0."
        yield config.hit("scheduler.params.cycle_second_step_size", message, "Write a number of steps.")


def _one_cycle(config: Config, name: str, params: dict[str, Any]) -> Iterator[Hit]:
    """What torch's OneCycleLR and CyclicLR ask of the run and of the optimizer."""
    if name == "OneCycleLR" and params.get("total_steps") is None:
        for key in ("epochs", "steps_per_epoch"):
            value = params.get(key)
            if not isinstance(value, int) or value <= 0:
                message = f"OneCycleLR without total_steps takes {key}, a whole number above 0: ValueError."
                yield config.hit(f"scheduler.params.{key}", message, 'Give "total_steps", the steps of the run.')
                return
    cycles = name in ("OneCycleLR", "CyclicLR") and params.get("cycle_momentum", True)
    if cycles and torch_class(config) in _NO_MOMENTUM:
        message = f"{name} cycles the momentum, which {config.get('optimizer.type')} doesn't have: ValueError."
        yield config.hit("scheduler.type", message, 'Write "cycle_momentum": false.')


@config_rule(
    "scheduler.plateau", severity="wrong",
    evidence="deepspeed/runtime/engine.py _take_model_step 0.19.8, run; torch 2.13",
)  # fmt: skip
def plateau(config: Config) -> Iterator[Hit]:
    """ReduceLROnPlateau, which is to see a loss and gets the batch size."""
    if schedule(config) == "ReduceLROnPlateau":
        message = (
            "DeepSpeed steps ReduceLROnPlateau with train_batch_size in place of a loss: it never gets better, "
            "and the rate falls again and again."
        )
        yield config.hit("scheduler.type", message, "Use a schedule of DeepSpeed's, or step it in the script.")
