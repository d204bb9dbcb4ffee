"""What every strategy offers to the training loop, and the choice of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch
from dslaunch.runtime.graph import Graph
from dslaunch.runtime.world import World


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one rank."""

    loss: Tensor
    """Mean over this rank's samples; a scalar without gradient."""
    grad_norm: float
    """2-norm of the whole gradient before clipping, the same on every rank."""
    lr: float
    """The decoder's learning rate in this step (of the first group that trains)."""


class Engine(Protocol):
    """A model under one strategy: replicated or sharded, with its optimizer and schedule."""

    def step(self, batches: list[Batch]) -> StepResult:
        """Accumulate the gradients of `batches` (this rank's micro-batches) and update the weights."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into `folder`; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote into `folder`; every rank calls it."""
        ...


def make_engine(model: Graph, plan: Plan, world: World, folder: Path) -> Engine:
    """`model` under the strategy of `plan`, whose rendered files stand in `folder`."""
    if plan.engine.sharding == "zero":
        from dslaunch.runtime.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, plan, world, folder / "ds_config.json")
    from dslaunch.runtime.engine_torch import TorchEngine

    return TorchEngine(model, plan, world)
