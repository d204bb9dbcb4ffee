"""The learning-rate schedule in DeepSpeed's terms, for a script that leaves it to deepspeed.initialize.

DeepSpeed's warm-ups last 2 steps at least, and are a step late: the first step has rate 0. A cosine without
warm-up is written as one that starts at the peak (warmup_min_ratio 1) and stays there for 2 steps; a linear
decay without warm-up as a OneCycle that is at its peak after one step, and falls to min_lr from there.
WarmupCosineLR multiplies the rate of each parameter group; WarmupLR and WarmupDecayLR put warmup_max_lr into all
groups, unless it is null; OneCycle has no null.
Source: deepspeed/runtime/lr_schedules.py, 0.16.9 to 0.19.8.
"""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_keys import release
from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan, TrainingPlan
from dslaunch.render.decimals import quotient

GROUP_RATES = "0.19.4"
"""The first release in which a warmup_max_lr of null takes each group's own rate; before, the first group's."""
_SHORTEST = 2
"""Steps of a warm-up at least."""
_KEPT = "training.optimizer.schedule=constant with warmup_steps=0 leaves it to the script"


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
    _require_known(training)
    peak = training.lr if shared else component.lr
    if training.lr_schedule == "linear" and training.warmup_steps == 0:
        return _falling(plan, peak, shared)
    steps = {"warmup_num_steps": training.warmup_steps or _SHORTEST, "warmup_type": "linear"}
    if training.lr_schedule == "cosine":
        start = {} if training.warmup_steps else {"warmup_min_ratio": 1.0}
        floor = min(1.0, quotient(training.min_lr, peak))
        total = max(training.steps, _SHORTEST)  # a run of one step, too, is at its peak
        return _block("WarmupCosineLR", total_num_steps=total, cos_min_ratio=floor, **steps, **start)
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": _peak_of_groups(plan, peak) if shared else peak}
    if training.lr_schedule == "constant":
        return _block("WarmupLR", **rates, **steps)
    if training.min_lr:
        raise ConfigError(
            f"training.optimizer.min_lr is {training.min_lr}: DeepSpeed's WarmupDecayLR ends at 0. "
            "Set it to 0, training.optimizer.schedule=cosine, or warmup_steps=0"
        )
    return _block("WarmupDecayLR", total_num_steps=training.steps, **rates, **steps)


def _require_known(training: TrainingPlan) -> None:
    if training.lr_schedule == "wsd":
        raise ConfigError(
            "training.optimizer.schedule is wsd: DeepSpeed has no schedule that stays at its peak and falls at "
            "the end. Take engine.huggingface=true (the Trainer has one), engine=megatron, or "
            f"module=dslaunch.runtime; {_KEPT}"
        )
    if training.warmup_steps == 1:
        raise ConfigError(
            f"training.optimizer.warmup_steps is 1: DeepSpeed's warm-ups last {_SHORTEST} steps at least. Set it "
            f"to {_SHORTEST} or more, or to 0; {_KEPT}"
        )


def _falling(plan: Plan, peak: float, shared: bool) -> dict[str, Any]:
    """A straight line from the peak to min_lr."""
    if shared and (own := _with_own_rate(plan, peak)):
        key = f"model.components.{own[0]}.lr"
        raise ConfigError(
            f"{key}: training.optimizer.schedule is linear without warm-up, for which DeepSpeed has OneCycle, "
            "which puts one rate into all parameter groups. Set "
            f"training.optimizer.warmup_steps={_SHORTEST} or more, or training.optimizer.schedule=cosine, or "
            f"leave {key} out; {_KEPT}"
        )
    training = plan.training
    return _block(
        "OneCycle",
        cycle_min_lr=min(training.min_lr, peak),
        cycle_max_lr=peak,
        cycle_first_step_size=1,
        cycle_second_step_size=max(1, training.steps - 1),
        cycle_momentum=False,
    )


def _with_own_rate(plan: Plan, lr: float) -> list[str]:
    """Components that train at another rate than `lr`."""
    return [name for name, each in plan.components.items() if each.trainable and each.lr != lr]


def _peak_of_groups(plan: Plan, lr: float) -> float | None:
    """warmup_max_lr: null, which is each group's own rate, where a component trains at another than `lr`."""
    own = _with_own_rate(plan, lr)
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
