"""The learning-rate schedule in DeepSpeed's terms, for a script that leaves it to deepspeed.initialize.

DeepSpeed's warm-ups last 2 steps at least, and are a step late: the first step has rate 0. A cosine without
warm-up is written as one that starts at the peak (warmup_min_ratio 1) and stays there for 2 steps; a linear decay
cannot be: from warmup_min_lr at the peak it has nowhere to fall. WarmupCosineLR multiplies the rate of each
parameter group; WarmupLR and WarmupDecayLR put warmup_max_lr into all groups, unless it is null.
Source: deepspeed/runtime/lr_schedules.py, 0.16.9 to 0.19.8.
"""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_keys import release
from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan

GROUP_RATES = "0.19.4"
"""The first release in which a warmup_max_lr of null takes each group's own rate; before, the first group's."""
_SHORTEST = 2
"""Steps of a warm-up at least."""


def scheduler(plan: Plan, component: ComponentPlan, shared: bool) -> dict[str, Any]:
    """The section `scheduler`, or nothing where the rate is constant from the start.

    Args:
        shared: the configuration is the whole model's, whose script may give components rates of their own.

    Raises:
        ConfigError: a schedule that DeepSpeed cannot follow.
    """
    training = plan.training
    if training.lr_schedule == "constant" and training.warmup_steps == 0:
        return {}
    if training.warmup_steps < _SHORTEST and not (
        training.lr_schedule == "cosine" and not training.warmup_steps
    ):
        raise ConfigError(
            f"training.optimizer.warmup_steps is {training.warmup_steps}: DeepSpeed has no {training.lr_schedule} "
            f"schedule with a warm-up of less than {_SHORTEST} steps. Set it to {_SHORTEST} or more, or "
            "training.optimizer.schedule=constant with warmup_steps=0"
        )
    peak = training.lr if shared else component.lr
    steps = {"warmup_num_steps": training.warmup_steps or _SHORTEST, "warmup_type": "linear"}
    if training.lr_schedule == "cosine":
        start = {} if training.warmup_steps else {"warmup_min_ratio": 1.0}
        floor = min(1.0, training.min_lr / peak)
        return _block("WarmupCosineLR", total_num_steps=training.steps, cos_min_ratio=floor, **steps, **start)
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": _peak_of_groups(plan, peak) if shared else peak}
    if training.lr_schedule == "constant":
        return _block("WarmupLR", **rates, **steps)
    if training.min_lr:
        raise ConfigError(
            f"training.optimizer.min_lr is {training.min_lr}: DeepSpeed's WarmupDecayLR ends at 0. "
            "Set it to 0, or training.optimizer.schedule=cosine"
        )
    return _block("WarmupDecayLR", total_num_steps=training.steps, **rates, **steps)


def _peak_of_groups(plan: Plan, lr: float) -> float | None:
    """warmup_max_lr: null, which is each group's own rate, where a component trains at another than `lr`."""
    own = [name for name, each in plan.components.items() if each.trainable and each.lr != lr]
    if own and release(plan.engine.version) < release(GROUP_RATES):
        key = f"model.components.{own[0]}.lr"
        raise ConfigError(
            f"{key}: training.optimizer.schedule is {plan.training.lr_schedule}, for which DeepSpeed "
            f"{plan.engine.version} puts one rate into all parameter groups. Set engine.version={GROUP_RATES} or "
            f"newer, training.optimizer.schedule=cosine, or leave {key} out"
        )
    return None if own else lr


def _block(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}
