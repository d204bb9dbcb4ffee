"""A layout for each component: one DeepSpeed engine per pipeline stage of each, on a mesh of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch, Samples
from dslaunch.runtime.deepspeed_internals import (
    let_ranks_differ_at_stage3,
    scope,
    squared_norm,
    take_norm,
    take_own_linear,
)
from dslaunch.runtime.deepspeed_states import copies_of, held_by, settle, unwritten, whole_copy
from dslaunch.runtime.engine_deepspeed import join_deepspeed, read_config
from dslaunch.runtime.exchange import Exchange
from dslaunch.runtime.graph import build_piece, given_weights, no_label, start_values, unset_model
from dslaunch.runtime.held import Held
from dslaunch.runtime.meshes import Mesh, Mpu, make_meshes
from dslaunch.runtime.messages import PIPELINE, Message, step_of
from dslaunch.runtime.own import Piece, judged_count
from dslaunch.runtime.proof import Copy
from dslaunch.runtime.schedule import lr_factor, make_scheduler
from dslaunch.runtime.stage import Reader, Stage
from dslaunch.runtime.step import Enter, StepResult
from dslaunch.runtime.store import Extra
from dslaunch.runtime.supported import shape_between, tokens_after, width_after
from dslaunch.runtime.tensor_parallel import slice_for
from dslaunch.runtime.weights import read_weights
from dslaunch.runtime.world import World


def _ignore(_phase: str) -> None:
    """For those who do not want to know."""


class NativeEngine:
    """The stages that this rank holds, and the order in which they work."""

    def __init__(
        self, plan: Plan, world: World, data: Samples, folder: Path, rounds: int = 0, enter: Enter = _ignore
    ) -> None:
        deepspeed = join_deepspeed(world)
        let_ranks_differ_at_stage3()
        self.plan, self.world, self.data, self.enter = plan, world, data, enter
        self.work = step_of(plan, rounds)
        dtype = torch.bfloat16 if plan.training.precision == "bf16" else torch.float32
        self.exchange = Exchange(self.work, world.rank, dtype, world.device, self._shape_of)
        timeout = timedelta(minutes=plan.launcher.timeout_minutes)
        meshes = make_meshes({name: part.grid for name, part in self.work.parts.items()}, world.rank, timeout)
        modules = build_pieces(plan, meshes)
        self.mpus = {name: Mpu(mesh) for name, mesh in meshes.items()}
        self.stages: dict[tuple[str, int], Stage] = {}
        self._norms: dict[str, float] = {}
        for (name, number), module in modules.items():
            engine = self._engine(deepspeed, name, module, folder)
            if engine is None:
                module.to(world.device, dtype)
            self.stages[name, number] = Stage(
                name, number, meshes[name], module, engine, self.work, self.exchange, world.rank
            )

    def step(self, number: int) -> StepResult:
        """Raises ConfigError, on every rank alike, where no token of the step has a label."""

        def read(samples: Sequence[int]) -> Batch:
            first = number * self.plan.global_batch
            return self.data.at(first + sample for sample in samples).to(self.world.device)

        judged, images = self._judged(read)
        if not judged:
            raise no_label(number)
        self.exchange.begin()
        for task in self.work.tasks:
            stage = self.stages.get((task.component, task.stage))
            if stage is None:
                continue
            self.enter(f"training step {number + 1}: {task.describe()}")
            if task.forward:
                stage.forward(task, read, judged)
            else:
                with scope(self.mpus[task.component]):
                    stage.backward(task)
        self.enter(f"training step {number + 1}: new weights")
        self.exchange.end()
        loss = self._loss(judged)
        norm = self._update(number)
        return StepResult(loss, norm, self._lr(number), int(images))

    def _engine(self, deepspeed: Any, name: str, module: nn.Module, folder: Path) -> Any:
        """The DeepSpeed engine of a piece; None where nothing of it trains."""
        trainable = [p for p in module.parameters() if p.requires_grad]
        if not trainable:
            return None
        with scope(self.mpus[name]):
            engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=trainable,
                config=read_config(folder / f"ds_config.{name}.json"),
                mpu=self.mpus[name],
                lr_scheduler=lambda optimizer: make_scheduler(optimizer, self.plan.training),
            )
        take_own_linear()
        return engine

    def _shape_of(self, message: Message) -> tuple[int, int]:
        """(tokens, width) of one sample in `message`."""
        specs = self.plan.model["components"]
        if message.edge != PIPELINE:
            edge = self.work.edges[message.edge]
            return tokens_after(edge["from"], list(self.work.edges)), width_after(specs[edge["from"]])
        edges = list(self.plan.model["edges"])
        return shape_between(message.sender.component, specs, edges, self.plan.training.seq_len)

    def _judged(self, read: Reader) -> Tensor:
        """(tokens that the loss falls on, images) of the global batch; every rank gets them first."""
        counts = torch.zeros(2, dtype=torch.int64, device=self.world.device)
        for stage in self.stages.values():
            if stage.judges and stage.mesh.place.shard == 0:
                shares = stage.part.shares
                for index in range(shares.micro_batches):
                    batch = read(shares.of(stage.mesh.place.replica, index))
                    counts[0] += judged_count(stage.module, batch)
                    counts[1] += batch.image_count
        dist.all_reduce(counts)
        return counts

    def _loss(self, judged: Tensor) -> Tensor:
        """The mean over the global batch, on every rank."""
        total = torch.zeros((), device=self.world.device)
        for stage in self.stages.values():
            if stage.judges and stage.mesh.place.shard == 0:
                total += torch.stack(stage.losses).float().sum()
            stage.losses.clear()
        dist.all_reduce(total)
        return total / judged

    def _update(self, number: int) -> float:
        """Clip by one norm over all components and update the weights; the norm.

        Raises:
            FloatingPointError: the gradient is not finite, on every rank alike.
        """
        norm = self._global_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of step {number + 1} is {norm}; lower training.optimizer.lr"
            )
        for stage in self._trained():
            with scope(self.mpus[stage.name]):
                take_norm(stage.engine, norm, self.plan.training.clip)
                stage.engine.step()
        return norm

    def _global_norm(self) -> float:
        """Stages' squared norms, each the same on all its ranks, brought to every rank and added."""
        slots = [(name, stage) for name, part in self.work.parts.items() for stage in range(part.grid.stages)]
        squares = torch.zeros(len(slots), dtype=torch.float64, device=self.world.device)
        for stage in self._trained():
            mpu = self.mpus[stage.name]
            with scope(mpu):
                square = squared_norm(stage.engine, mpu)
            squares[slots.index((stage.name, stage.number))] = square
            self._norms[f"{stage.name}, {stage.tag}"] = math.sqrt(square)
        dist.all_reduce(squares, op=dist.ReduceOp.MAX)
        return math.sqrt(float(squares.sum()))

    def _lr(self, number: int) -> float:
        """The decoder's learning rate, or that of the first component that trains."""
        names = [self.work.trunk, *self.work.parts]
        specs = self.plan.model["components"]
        peak = self.plan.components[next(n for n in names if specs[n]["train"] != "nothing")].lr
        return peak * lr_factor(number, self.plan.training, peak)

    def held(self, anew: bool = False) -> Iterator[Held]:
        for stage in self.stages.values():
            names = _names(stage)
            if stage.engine is not None:
                yield from held_by(stage.engine, names, stage.mesh.shard, stage.mesh.replicas, anew)
            else:
                yield from (unwritten(parameter, name, stage.mesh.shard) for parameter, name in names.items())

    def copies(self) -> Iterator[Copy]:
        for stage in self.stages.values():
            names = _names(stage)
            if stage.engine is not None:
                yield from copies_of(stage.engine, names, stage.mesh.shard, stage.mesh.replicas)
            else:
                yield from (whole_copy(parameter, name, stage.mesh.shard) for parameter, name in names.items())

    def norms(self) -> Mapping[str, float]:
        return self._norms

    def extra(self) -> Extra:
        return {}

    def settle(self, step: int, extra: Extra) -> None:
        for stage in self._trained():
            with scope(self.mpus[stage.name]):
                settle(stage.engine, step)

    def _trained(self) -> list[Stage]:
        return [stage for stage in self.stages.values() if stage.engine is not None]


def _names(stage: Stage) -> dict[nn.Parameter, str]:
    """Of its parameters in the whole model."""
    return {parameter: f"parts.{stage.name}.{name}" for name, parameter in stage.module.named_parameters()}


def build_pieces(plan: Plan, meshes: dict[str, Mesh]) -> dict[tuple[str, int], nn.Module]:
    """The stages that this rank holds, by component and number, with the same start values as in every layout.

    The host holds one whole matrix of the model at a time.
    """
    modules = {
        (name, stage): build_piece(plan, name, piece_of(plan, name, stage, mesh))
        for name, mesh in meshes.items()
        for stage in mesh.grid.stages_at(mesh.place)
    }
    held = {
        f"parts.{name}.{key}": (parameter, meshes[name].shard)
        for (name, _), module in modules.items()
        for key, parameter in module.named_parameters(remove_duplicate=False)
    }
    with torch.device("meta"):
        whole = unset_model(plan)
    with torch.no_grad():
        for key, value in start_values(whole, plan.training.seed, given_weights(plan)):
            if key in held:
                parameter, shard = held[key]
                parameter.copy_(slice_for(value, parameter, shard))
    given = given_weights(plan)
    for (name, _), module in modules.items():
        if name in given:
            read_weights(Path(given[name]), name, module, whole.parts[name], meshes[name].shard)
    return modules


def piece_of(plan: Plan, name: str, stage: int, mesh: Mesh) -> Piece:
    """The layers of a stage: the plan's share of each group of ranks is cut into vpp equal parts."""
    layout = plan.components[name]
    counts = [count // layout.vpp for count in layout.layers_per_stage] * layout.vpp
    start = sum(counts[:stage])
    return Piece(range(start, start + counts[stage]), stage == 0, stage == mesh.grid.stages - 1, mesh.shard)
