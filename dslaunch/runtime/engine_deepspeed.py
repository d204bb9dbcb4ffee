"""DeepSpeed's ZeRO 0-3, with or without offload, driven by the rendered ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch, Samples, micro_batches
from dslaunch.runtime.deepspeed_internals import leave_out_shared_memory_op, use_cpu_accelerator
from dslaunch.runtime.deepspeed_states import copies_of, held_by, loss_scaler, set_loss_scaler, settle
from dslaunch.runtime.graph import build_model, counted, parameter_groups
from dslaunch.runtime.held import Held
from dslaunch.runtime.proof import Copy
from dslaunch.runtime.schedule import make_scheduler
from dslaunch.runtime.step import StepResult
from dslaunch.runtime.store import Extra
from dslaunch.runtime.tensor_parallel import ALONE
from dslaunch.runtime.world import World


class DeepSpeedEngine:
    """One deepspeed engine over the whole model; optimizer, precision and sharding come from its JSON."""

    def __init__(self, plan: Plan, world: World, data: Samples, config: Path) -> None:
        deepspeed = join_deepspeed(world)
        model = self.graph = build_model(plan)
        self.plan, self.world, self.data = plan, world, data
        self._norm = 0.0
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, plan),
            config=read_config(config),
            lr_scheduler=lambda optimizer: make_scheduler(optimizer, plan.training),
        )
        self.replicated = self.engine.zero_optimization_stage() == 0
        """At stage 0 gradients are whole on each rank, and DeepSpeed does not report their norm."""

    def step(self, number: int) -> StepResult:
        batches = micro_batches(self.data, number, self.world.rank, self.plan)
        lr = float(self.engine.basic_optimizer.param_groups[0]["lr"])
        whole = counted(self.graph, batches, self.world, number)
        losses, norm = [], 0.0
        for batch in batches:
            losses.append(self._backward(batch.to(self.world.device), whole.share))
            if self.replicated and batch is batches[-1]:
                norm = float(torch.nn.utils.get_total_norm(self._gradients()))
            self.engine.step()
        self._norm = norm = norm if self.replicated else float(self.engine.get_global_grad_norm())
        return StepResult(torch.stack(losses).mean(), norm, lr, whole.images)

    def _backward(self, batch: Batch, share: float) -> Tensor:
        loss: Tensor = self.engine(batch, share)
        self.engine.backward(loss)
        return loss.detach().float()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]

    def held(self, anew: bool = False) -> Iterator[Held]:
        names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        return held_by(self.engine, names, ALONE, None, anew)

    def copies(self) -> Iterator[Copy]:
        names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        return copies_of(self.engine, names, ALONE, None)

    def norms(self) -> Mapping[str, float]:
        return {"model": self._norm}

    def extra(self) -> Extra:
        return {"updates": self.engine.lr_scheduler.last_epoch, "loss_scaler": loss_scaler(self.engine)}

    def settle(self, step: int, extra: Extra) -> None:
        settle(self.engine, int(extra.get("updates", step)))
        set_loss_scaler(self.engine, extra.get("loss_scaler") or {})


def join_deepspeed(world: World) -> Any:
    """The module deepspeed, in the process group that this rank has joined."""
    if world.device.type == "cpu":
        use_cpu_accelerator()
    import deepspeed

    if world.device.type == "cpu":
        leave_out_shared_memory_op()
    deepspeed.init_distributed(dist_backend="gloo" if world.device.type == "cpu" else "nccl")
    return deepspeed


def read_config(path: Path) -> dict[str, Any]:
    """The rendered DeepSpeed configuration.

    Raises:
        ConfigError: the file is missing or not JSON.
    """
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}. Render it again with `dslaunch render`.") from error
    return config
