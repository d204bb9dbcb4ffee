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
    peak towards min_lr, which it would reach in step `training.steps`.
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    floor = min(1.0, training.min_lr / peak)
    return floor + (1.0 - floor) * shape[training.lr_schedule]


def make_scheduler(optimizer: Optimizer, training: TrainingPlan) -> LambdaLR:
    """The schedule over the optimizer's parameter groups, each towards min_lr from a peak of its own."""

    def factor_from(peak: float) -> Callable[[int], float]:
        return lambda step: lr_factor(step, training, peak)

    return LambdaLR(optimizer, [factor_from(group["lr"]) for group in optimizer.param_groups])
