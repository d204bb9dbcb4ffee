"""The learning rate as a function of the step: one definition for every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dslaunch.planfile import TrainingPlan


def lr_factor(step: int, training: TrainingPlan, peak: float) -> float:
    """What `peak` is multiplied by in step `step` (from 0).

    The warm-up rises in equal parts and reaches the peak with its last step; then the shape runs from the
    peak towards min_lr, which it would reach in step `training.steps`. wsd stays at the peak until the last
    `lr_decay_steps`.
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    falls = training.lr_decay_steps or training.steps - training.warmup_steps
    done = max(0.0, (step - (training.steps - falls)) / max(1, falls))
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "sqrt": 1.0 - math.sqrt(done),
    }
    floor = min(1.0, training.min_lr / peak)
    return floor + (1.0 - floor) * shape[training.lr_decay_shape or training.lr_schedule]


def make_scheduler(optimizer: Optimizer, training: TrainingPlan) -> LambdaLR:
    """The schedule over the optimizer's parameter groups, each towards min_lr from a peak of its own."""

    def factor_from(peak: float) -> Callable[[int], float]:
        return lambda step: lr_factor(step, training, peak)

    return LambdaLR(optimizer, [factor_from(group["lr"]) for group in optimizer.param_groups])


def place_scheduler(scheduler: LambdaLR, step: int) -> None:
    """Let the schedule stand where it is after `step` steps, and the optimizer have the rates of it."""
    scheduler.last_epoch = step
    scheduler._step_count = step + 1
    groups = scheduler.optimizer.param_groups
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)
    scheduler._last_lr = [group["lr"] for group in groups]
