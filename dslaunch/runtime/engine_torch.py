"""DistributedDataParallel and FSDP2 (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch, Digits, micro_batches
from dslaunch.runtime.engines import StepResult
from dslaunch.runtime.graph import Graph, build_model, parameter_groups
from dslaunch.runtime.layers import Block
from dslaunch.runtime.schedule import make_scheduler
from dslaunch.runtime.world import World


class TorchEngine:
    """AdamW on fp32 weights; under bf16 the passes run in bf16 and gradients are reduced in fp32."""

    def __init__(self, plan: Plan, world: World, data: Digits) -> None:
        self.plan, self.world, self.data = plan, world, data
        model = build_model(plan)
        self.bf16 = plan.training.precision == "bf16"
        self.model = _wrapped(model.to(world.device), plan, world)
        self.max_norm = plan.training.clip or math.inf
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, plan), betas=plan.training.betas, eps=plan.training.eps
        )
        self.scheduler = make_scheduler(self.optimizer, plan.training)

    def step(self, number: int) -> StepResult:
        batches = micro_batches(self.data, number, self.world.rank, self.plan)
        losses = [self._backward(batch, len(batches), batch is batches[-1]) for batch in batches]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return StepResult(torch.stack(losses).mean(), float(whole), lr)

    def _backward(self, batch: Batch, count: int, last: bool) -> Tensor:
        """DDP reduces with the last micro-batch; FSDP2 with each, so that its gradients stay sharded."""
        replica = self.model if isinstance(self.model, DistributedDataParallel) else None
        batch = batch.to(self.world.device)
        with replica.no_sync() if replica and not last else contextlib.nullcontext():
            with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16 and replica is not None):
                loss = self.model(batch.images, batch.tokens, batch.labels)
            (loss / count).backward()
        return cast(Tensor, loss.detach().float())

    def save(self, folder: Path) -> None:
        save_distributed(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        load_distributed(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        self.scheduler.load_state_dict(state["scheduler"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}


def _wrapped(model: Graph, plan: Plan, world: World) -> nn.Module:
    if plan.engine.sharding == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(world.device.type, (world.size,))
    dtype = torch.bfloat16 if plan.training.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
