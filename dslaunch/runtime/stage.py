"""One pipeline stage of one component on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dslaunch.runtime.components import Decoder, ViT
from dslaunch.runtime.data import Batch
from dslaunch.runtime.deepspeed_internals import before_backward, linear_of
from dslaunch.runtime.exchange import Exchange
from dslaunch.runtime.graph import arguments, joined
from dslaunch.runtime.meshes import Mesh
from dslaunch.runtime.messages import PIPELINE, Message, Step
from dslaunch.runtime.own import reads
from dslaunch.runtime.tasks import Task

Reader = Callable[[Sequence[int]], Batch]
"""Samples of the current step by number."""


@dataclass(frozen=True)
class Held:
    """What one micro-batch keeps for its backward pass."""

    inputs: dict[int, Tensor]
    """By edge (PIPELINE: from the stage before), as leaves."""
    output: Tensor


class Stage:
    """A piece of a component, its DeepSpeed engine where it trains, and the micro-batches in flight."""

    def __init__(
        self,
        name: str,
        number: int,
        mesh: Mesh,
        module: nn.Module,
        engine: Any,
        step: Step,
        exchange: Exchange,
        rank: int,
    ) -> None:
        self.name, self.number, self.mesh, self.module, self.engine = name, number, mesh, module, engine
        self.step, self.exchange, self.rank = step, exchange, rank
        self.part = step.parts[name]
        self.first = number == 0
        self.last = number == mesh.grid.stages - 1
        self.held: dict[int, Held] = {}
        self.most_held = 0
        """The most micro-batches that were in flight at once, since the start."""
        self.losses: list[Tensor] = []
        """Of the trunk's last stage: the summed loss of each micro-batch of this step."""

    @property
    def tag(self) -> str:
        """Its name within the component."""
        return f"stage{self.number}"

    @property
    def judges(self) -> bool:
        """Whether the loss is made here."""
        return self.last and self.name == self.step.judge

    @property
    def reads(self) -> bool:
        """Whether it needs the data: images, tokens or labels."""
        return self.judges or reads(self.module) or (self.first and isinstance(self.module, ViT | Decoder))

    def forward(self, task: Task, read: Reader, judged: Tensor) -> None:
        """Take what `task` needs, run it, send what it gives.

        Args:
            judged: tokens that the loss falls on in the whole step.
        """
        own = read(self.step.samples(task, self.rank)) if self.reads else None
        inputs = self._inputs(task)
        with torch.set_grad_enabled(self.part.backward), linear_of(self.engine):
            output = self._run(inputs, own)
        if self.judges:
            self.losses.append(output.detach())
            # DeepSpeed averages gradients over replicas; the loss is a mean over tokens.
            output = output * (self.mesh.grid.dp / judged)
        if self.part.backward:
            self.held[task.index] = Held(inputs, output)
            self.most_held = max(self.most_held, len(self.held))
        self._send(task, output)

    def backward(self, task: Task) -> None:
        """Take the gradient of the output of `task`, run backward, send the inputs' gradients."""
        held = self.held.pop(task.index)
        target = held.output if self.judges else self._driven(task, held.output)
        if self.engine is not None:
            before_backward(self.engine, task.index)
            with linear_of(self.engine):  # recompute runs the forward pass again
                self.engine.backward(target, scale_wrt_gas=False)
            self._count(task)
        elif target.requires_grad:
            target.backward()  # type: ignore[no-untyped-call]
        for message in self.exchange.outgoing[task]:
            gradient = held.inputs[message.edge].grad
            assert gradient is not None, message
            self.exchange.send(message, self._rows(gradient, task, message))

    def _count(self, task: Task) -> None:
        """DeepSpeed counts micro-batches by calls of step; the last one waits for the norm of all components."""
        if task.index < self.part.shares.micro_batches - 1:
            self.engine.step()

    def _inputs(self, task: Task) -> dict[int, Tensor]:
        """The leaves that `task` starts from, by edge."""
        pieces: dict[int, list[Tensor]] = {}
        for message in self.exchange.incoming[task]:
            pieces.setdefault(message.edge, []).append(self.exchange.take(message))
        inputs = {edge: torch.cat(rows) for edge, rows in sorted(pieces.items())}
        for edge, rows in inputs.items():
            before = self.name if edge == PIPELINE else self.step.edges[edge]["from"]
            rows.requires_grad_(self.step.parts[before].backward)
        return inputs

    def _run(self, inputs: dict[int, Tensor], own: Batch | None) -> Tensor:
        run = self.module if self.engine is None else self.engine
        x = inputs.get(PIPELINE)
        if x is None and inputs:
            x = joined([self.step.edges[edge] for edge in inputs], list(inputs.values()))
        output: Tensor = run(*arguments(self.module, x, own))
        return output

    def _send(self, task: Task, output: Tensor) -> None:
        for message in self.exchange.outgoing[task]:
            self.exchange.send(message, self._rows(output, task, message))

    def _rows(self, rows: Tensor, task: Task, message: Message) -> Tensor:
        """Those of `rows` that `message` brings: a block of the micro-batch's samples."""
        start = self.step.samples(task, self.rank).index(message.samples[0])
        return rows[start : start + len(message.samples)]

    def _driven(self, task: Task, output: Tensor) -> Tensor:
        """A scalar whose gradient with respect to `output` is the one that arrives.

        A gradient over an edge carries the reader's number of replicas, over which that component's engine
        averages; this component's engine averages over its own.
        """
        gradient = torch.zeros_like(output, dtype=torch.float32)
        samples = self.step.samples(task, self.rank)
        for message in self.exchange.incoming[task]:
            scale = 1.0
            if message.edge != PIPELINE:
                reader = self.step.parts[self.step.edges[message.edge]["to"]]
                scale = self.part.grid.dp / reader.grid.dp
            start = samples.index(message.samples[0])
            rows = self.exchange.take(message).float()
            gradient[start : start + len(message.samples)] += rows * scale
        return (output.float() * gradient).sum()
