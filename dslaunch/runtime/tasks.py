"""The order of forward and backward passes of one optimizer step, over all components and stages.

All ranks make the same list and each executes its own tasks of it, in this order. What a task needs was sent by
tasks that stand before it, so that no order of arrival can block the job.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One pass of one micro-batch through one pipeline stage of a component, in every replica alike."""

    component: str
    stage: int
    index: int
    """The micro-batch, numbered by the component's own count."""
    forward: bool

    def describe(self) -> str:
        """Such as `forward of micro-batch 3 in llm, stage 1`."""
        way = "forward" if self.forward else "backward"
        return f"{way} of micro-batch {self.index} in {self.component}, stage {self.stage}"


@dataclass(frozen=True)
class Item:
    """Tasks that follow one another, and the tasks of other streams that stand before them."""

    tasks: tuple[Task, ...]
    needs: tuple[Task, ...]


@dataclass(frozen=True)
class Lane:
    """A component as the order of tasks sees it."""

    name: str
    stages: int
    micro_batches: int
    backward: bool
    """Whether gradients are wanted: of its own parameters, or of a component before it."""


def trunk_order(
    stage: int, stages: int, micro_batches: range, schedule: str, backward: bool
) -> list[tuple[bool, int]]:
    """(forward, micro-batch) in the order of one stage.

    1F1B holds at most stages - stage micro-batches (Narayanan et al. 2021, arXiv:2104.04473, figure 4); GPipe
    holds all of them (Huang et al. 2019, arXiv:1811.06965).
    """
    ahead = len(micro_batches) if schedule == "gpipe" else stages - stage - 1
    return _alternating(micro_batches, ahead, backward)


def in_rounds(front: list[Lane], trunk: Lane, rounds: int, schedule: str) -> list[Task]:
    """For components that share ranks: per round the front's forwards, the trunk's pipeline, the front's backward.

    Args:
        front: the components before the trunk, each after those that it reads.
    """
    tasks: list[Task] = []
    for number in range(rounds):
        tasks += _front(front, rounds, number, forward=True)
        tasks += _merged(_trunk_streams(trunk, _share(trunk, rounds, number), schedule, {}))
        tasks += _front(front, rounds, number, forward=False)
    return tasks


def in_lockstep(front: list[Lane], trunk: Lane, rounds: int, schedule: str) -> list[Task]:
    """For a front on ranks of its own: it works on later rounds while the trunk works on earlier ones.

    The front runs 1F1B over rounds, like a stage before the trunk's first: it is ahead by the rounds that fill
    the trunk's pipeline.
    """
    fill = -(-trunk.stages // (trunk.micro_batches // rounds))
    ahead = rounds if schedule == "gpipe" else fill
    wanted = any(lane.backward for lane in front)
    stream: list[Item] = []
    fed: dict[int, Task] = {}
    for forward, number in _alternating(range(rounds), ahead, wanted):
        tasks = _front(front, rounds, number, forward)
        share = _share(trunk, rounds, number)
        stream.append(Item(tuple(tasks), () if forward else (Task(trunk.name, 0, share[-1], False),)))
        if forward:
            fed |= dict.fromkeys(share, tasks[-1])
    return _merged([stream, *_trunk_streams(trunk, range(trunk.micro_batches), schedule, fed)])


def _alternating(numbers: range, ahead: int, backward: bool) -> list[tuple[bool, int]]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    if not backward:
        return [(True, number) for number in numbers]
    order = [(True, number) for number in numbers[:ahead]]
    for position, number in enumerate(numbers):
        order += [(True, each) for each in numbers[ahead + position : ahead + position + 1]]
        order.append((False, number))
    return order


def _trunk_streams(
    trunk: Lane, micro_batches: range, schedule: str, fed: dict[int, Task]
) -> list[list[Item]]:
    """Each stage's order.

    Args:
        fed: by micro-batch, the front's task after which it can start.
    """
    return [
        [
            _trunk_item(trunk, Task(trunk.name, stage, index, forward), fed)
            for forward, index in trunk_order(stage, trunk.stages, micro_batches, schedule, trunk.backward)
        ]
        for stage in range(trunk.stages)
    ]


def _trunk_item(trunk: Lane, task: Task, fed: dict[int, Task]) -> Item:
    before = task.stage - 1 if task.forward else task.stage + 1
    if 0 <= before < trunk.stages:
        return Item((task,), (Task(trunk.name, before, task.index, task.forward),))
    return Item((task,), (fed[task.index],) if task.forward and fed else ())


def _front(front: list[Lane], rounds: int, number: int, forward: bool) -> list[Task]:
    """The front's passes of one round: micro-batch after micro-batch through the stages."""
    lanes = front if forward else [lane for lane in reversed(front) if lane.backward]
    return [
        Task(lane.name, stage if forward else lane.stages - 1 - stage, index, forward)
        for lane in lanes
        for index in _share(lane, rounds, number)
        for stage in range(lane.stages)
    ]


def _share(lane: Lane, rounds: int, number: int) -> range:
    per_round = lane.micro_batches // rounds
    return range(number * per_round, (number + 1) * per_round)


def _merged(streams: list[list[Item]]) -> list[Task]:
    """One order that keeps each stream's own, in which nothing stands before what it needs."""
    merged: dict[Task, None] = {}
    left = [stream for stream in streams if stream]
    while left:
        before = len(merged)
        for stream in left:
            if all(task in merged for task in stream[0].needs):
                merged |= dict.fromkeys(stream.pop(0).tasks)
        assert len(merged) > before, "the schedule has a cycle"
        left = [stream for stream in left if stream]
    return list(merged)
