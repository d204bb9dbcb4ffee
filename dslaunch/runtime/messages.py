"""Which rank sends which samples to whom: the step of a plan as tasks and messages. Pure, without torch.

Forward, a component's input is redistributed from the last stage of the one it reads: each receiver takes each
sample from exactly one tensor-parallel replica, since their outputs are equal. Backward the table is
transposed: a receiver takes each sample's gradient from one tensor-parallel replica of the reader, where it is
complete. Between two stages of a component, every rank sends to its counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.runtime.coupled import executed
from dslaunch.runtime.grid import Grid, Shares, grid_of
from dslaunch.runtime.supported import judge_of, stands_apart, trunk_of
from dslaunch.runtime.tasks import Lane, Task, in_lockstep, in_rounds

PIPELINE = -1
"""In the place of an edge's number: from stage to stage within a component."""


@dataclass(frozen=True)
class Message:
    """Rows of one tensor, from one rank to another; from a rank to itself they stay where they are."""

    edge: int
    """Position in the model's edges, or PIPELINE."""
    sender: Task
    receiver: Task
    source: int
    destination: int
    samples: tuple[int, ...]
    """Numbers within the step, ascending."""


@dataclass(frozen=True)
class Part:
    """A component in the step."""

    grid: Grid
    shares: Shares
    backward: bool
    """Whether gradients are wanted: of its own parameters, or of a component before it."""


@dataclass(frozen=True)
class Step:
    """All tasks of one optimizer step, and the messages that each sends."""

    parts: dict[str, Part]
    edges: tuple[dict[str, Any], ...]
    trunk: str
    judge: str
    """The component that makes the loss."""
    rounds: int
    ranks_per_node: int
    tasks: tuple[Task, ...]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which they are sent."""
        return tuple(message for task in self.tasks for message in self._sent(task))

    def samples(self, task: Task, rank: int) -> tuple[int, ...]:
        """The samples that `rank` works on in `task`."""
        part = self.parts[task.component]
        place = part.grid.place(rank)
        assert place is not None, (task, rank)
        return part.shares.of(place.replica, task.index)

    def _sent(self, task: Task) -> Iterator[Message]:
        part = self.parts[task.component]
        stage = task.stage + 1 if task.forward else task.stage - 1
        if 0 <= stage < part.grid.stages:
            yield from self._between_stages(task, part, stage)
            return
        here, there = ("from", "to") if task.forward else ("to", "from")
        for number, edge in enumerate(self.edges):
            if edge[here] == task.component and (task.forward or self.parts[edge[there]].backward):
                yield from self._over_edge(task, number, edge[there])

    def _between_stages(self, task: Task, part: Part, stage: int) -> Iterator[Message]:
        receiver = replace(task, stage=stage)
        for replica in range(part.grid.dp):
            for shard in range(part.grid.tp):
                source, destination = (part.grid.rank(s, replica, shard) for s in (task.stage, stage))
                samples = part.shares.of(replica, task.index)
                yield Message(PIPELINE, task, receiver, source, destination, samples)

    def _over_edge(self, task: Task, number: int, other: str) -> Iterator[Message]:
        mine, theirs = self.parts[task.component], self.parts[other]
        stage = 0 if task.forward else theirs.grid.stages - 1
        for replica in range(mine.grid.dp):
            holders = [mine.grid.rank(task.stage, replica, shard) for shard in range(mine.grid.tp)]
            samples = mine.shares.of(replica, task.index)
            for (to, index), group in groupby(samples, theirs.shares.owners.__getitem__):
                rows = tuple(group)
                receiver = Task(other, stage, index, task.forward)
                for shard in range(theirs.grid.tp):
                    destination = theirs.grid.rank(stage, to, shard)
                    source = self._holder(holders, destination, shard)
                    yield Message(number, task, receiver, source, destination, rows)

    def _holder(self, holders: list[int], destination: int, shard: int) -> int:
        """Which of equal holders sends: the receiver itself, else one in its node, spread over shards."""
        if destination in holders:
            return destination
        node = destination // self.ranks_per_node
        near = [rank for rank in holders if rank // self.ranks_per_node == node] or holders
        return near[shard % len(near)]


def step_of(plan: Plan, rounds: int = 0) -> Step:
    """The step of `plan`.

    Args:
        rounds: parts of a step that pass one after another, so that less is held at a time; 0: the plan's
            macro-batches where components share ranks, as many as the micro-batches allow where the trunk stands
            apart.
    """
    specs, every = executed(plan.model["components"], plan.model["edges"])
    edges = tuple(every)
    trunk, judge = trunk_of(specs), judge_of(specs, every)
    front = [name for name in in_order(specs, edges) if name not in (trunk, judge)]
    apart = stands_apart(plan.components, trunk, front)
    most = math.gcd(*(plan.components[name].num_microbatches for name in (trunk, *front)))
    rounds = rounds or (most if apart else plan.training.macro_batches)
    assert most % rounds == 0, (most, rounds)
    wanted = wanting_gradients(specs, edges)
    layouts = {name: plan.components[name] for name in specs}
    per_micro_batch = layouts[trunk].num_microbatches
    parts = {
        name: Part(
            grid_of(layout),
            Shares(
                plan.global_batch, layouts[trunk].dp, layout.dp, layout.num_microbatches,
                # A head is fed each of the trunk's micro-batches for itself.
                rounds if name in (trunk, *front) else per_micro_batch,
            ),
            name in wanted,
        )
        for name, layout in layouts.items()
    }  # fmt: skip
    lanes = {name: _lane(name, layout, wanted) for name, layout in layouts.items()}
    order = in_lockstep if apart else in_rounds
    head = lanes[judge] if judge != trunk else None
    tasks = order([lanes[name] for name in front], lanes[trunk], head, rounds, plan.training.schedule)
    return Step(parts, edges, trunk, judge, rounds, plan.cluster.gpus_per_node, tuple(tasks))


def in_order(specs: dict[str, Any], edges: tuple[dict[str, Any], ...]) -> list[str]:
    """The components, each after those that it reads."""
    order: list[str] = []
    while len(order) < len(specs):
        order += [
            name
            for name in specs
            if name not in order and all(edge["from"] in order for edge in edges if edge["to"] == name)
        ]
    return order


def wanting_gradients(specs: dict[str, Any], edges: tuple[dict[str, Any], ...]) -> frozenset[str]:
    """Components that train, or that a component which does stands before."""
    wanted: set[str] = set()
    for name in in_order(specs, edges):
        if specs[name]["train"] != "nothing" or any(e["from"] in wanted for e in edges if e["to"] == name):
            wanted.add(name)
    return frozenset(wanted)


def _lane(name: str, layout: ComponentPlan, wanted: frozenset[str]) -> Lane:
    return Lane(name, layout.pp, layout.num_microbatches, name in wanted, layout.vpp)
