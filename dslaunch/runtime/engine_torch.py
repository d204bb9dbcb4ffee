"""DistributedDataParallel and FSDP2 (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch, Samples, micro_batches
from dslaunch.runtime.deepspeed_states import replicated, unwritten
from dslaunch.runtime.graph import Graph, build_model, counted, parameter_groups
from dslaunch.runtime.held import Cut, Held, fresh_states, local
from dslaunch.runtime.layers import Block
from dslaunch.runtime.proof import Copy
from dslaunch.runtime.schedule import make_scheduler, place_scheduler
from dslaunch.runtime.step import StepResult
from dslaunch.runtime.store import Extra
from dslaunch.runtime.tensor_parallel import ALONE
from dslaunch.runtime.world import World


class TorchEngine:
    """AdamW on fp32 weights; under bf16 the passes run in bf16 and gradients are reduced in fp32."""

    def __init__(self, plan: Plan, world: World, data: Samples) -> None:
        self.plan, self.world, self.data = plan, world, data
        model = self.graph = build_model(plan)
        self.bf16 = plan.training.precision == "bf16"
        self.model = _wrapped(model.to(world.device), plan, world)
        self.max_norm = plan.training.clip or math.inf
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, plan), betas=plan.training.betas, eps=plan.training.eps
        )
        self.scheduler = make_scheduler(self.optimizer, plan.training)
        self._norm = 0.0
        self._ordered = not isinstance(self.model, DistributedDataParallel)

    def step(self, number: int) -> StepResult:
        batches = micro_batches(self.data, number, self.world.rank, self.plan)
        found = counted(self.graph, batches, self.world, number)
        if not self._ordered:
            self._order(batches[0], found.share)
        losses = [self._backward(batch, found.share, len(batches), batch is batches[-1]) for batch in batches]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._norm = float(whole)
        return StepResult(torch.stack(losses).mean(), self._norm, lr, found.images)

    def _order(self, batch: Batch, share: float) -> None:
        """Let DDP lay its buckets out before the first step.

        It does so behind the first backward pass of a process, by the order in which gradients came, and sums are
        rounded by their place in a bucket: a resumed run's first step would not be that of an unbroken run, to the
        bit (torch/csrc/distributed/c10d/reducer.cpp, 2.13, rebuild_buckets).
        """
        self._backward(batch, share, 1, last=True)
        self.optimizer.zero_grad()
        self._ordered = True

    def _backward(self, batch: Batch, share: float, count: int, last: bool) -> Tensor:
        """DDP reduces with the last micro-batch; FSDP2 with each, so that its gradients stay sharded."""
        replica = self.model if isinstance(self.model, DistributedDataParallel) else None
        batch = batch.to(self.world.device)
        with replica.no_sync() if replica and not last else contextlib.nullcontext():
            with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16 and replica is not None):
                loss = self.model(batch, share)
            (loss / count).backward()
        return cast(Tensor, loss.detach().float())

    def held(self, anew: bool = False) -> Iterator[Held]:
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                yield _unwritten(parameter, name)
            elif isinstance(parameter, DTensor):
                known = self.optimizer.state
                states = fresh_states(self.optimizer, parameter) if anew else known.get(parameter, {})
                piece = _rows(parameter, name)
                yield replace(piece, states=states, written=(0, piece.weight.numel()), trains=True)
            else:
                place = (self.world.rank, self.world.size)
                yield replicated(self.optimizer, parameter, name, ALONE, *place, anew)

    def copies(self) -> Iterator[Copy]:
        if isinstance(self.model, DistributedDataParallel):
            for name, parameter in self.model.module.named_parameters():
                yield Copy(name, "", parameter)

    def norms(self) -> Mapping[str, float]:
        return {"model": self._norm}

    def extra(self) -> Extra:
        return {}

    def settle(self, step: int, extra: Extra) -> None:
        place_scheduler(self.scheduler, step)


def _unwritten(parameter: nn.Parameter, name: str) -> Held:
    return _rows(parameter, name) if isinstance(parameter, DTensor) else unwritten(parameter, name, ALONE)


def _rows(parameter: DTensor, name: str) -> Held:
    """The rows of a parameter that FSDP2 leaves on this rank: as torch.chunk cuts it."""
    rows = parameter.shape[0]
    each = -(-rows // parameter.device_mesh.size())
    first = min(rows, each * parameter.device_mesh.get_local_rank()) if rows else 0
    width = parameter.numel() // rows
    return Held(name, tuple(parameter.shape), Cut(), first * width, local(parameter).view(-1), trains=False)


def _wrapped(model: Graph, plan: Plan, world: World) -> nn.Module:
    if plan.engine.sharding == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(world.device.type, (world.size,))
    dtype = torch.bfloat16 if plan.training.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in units_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def units_of(model: Graph) -> list[nn.Module]:
    """What FSDP2 gathers at a time: the blocks, and those of components with modules of their own."""
    own = [unit for part in model.parts.values() for unit in getattr(part, "units", ())]
    return [module for module in model.modules() if isinstance(module, Block)] + own
