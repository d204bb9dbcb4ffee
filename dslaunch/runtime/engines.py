"""What every strategy offers to the training loop, and the choice of one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Samples
from dslaunch.runtime.proof import Proved
from dslaunch.runtime.step import Enter, StepResult
from dslaunch.runtime.store import Keeper
from dslaunch.runtime.world import World


class Engine(Keeper, Proved, Protocol):
    """A model under one strategy: replicated or sharded, with its optimizer and schedule."""

    def step(self, number: int) -> StepResult:
        """Optimizer step `number` (from 0): gradients of its global batch, then new weights."""
        ...


def make_engine(plan: Plan, world: World, data: Samples, folder: Path, enter: Enter) -> Engine:
    """The model of `plan` under its strategy, whose rendered files stand in `folder`."""
    if plan.engine.name == "native":
        from dslaunch.runtime.engine_native import NativeEngine

        return NativeEngine(plan, world, data, folder, enter=enter)
    if plan.engine.sharding == "zero":
        from dslaunch.runtime.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(plan, world, data, folder / "ds_config.json")
    from dslaunch.runtime.engine_torch import TorchEngine

    return TorchEngine(plan, world, data)
