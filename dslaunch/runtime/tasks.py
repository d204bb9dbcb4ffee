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
    """Of pp * vpp."""
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
    pp: int
    """Groups of ranks that hold its pipeline."""
    micro_batches: int
    backward: bool
    """Whether gradients are wanted: of its own parameters, or of a component before it."""
    vpp: int = 1
    """Stages on each group; above 1 in the interleaved schedule alone."""

    @property
    def stages(self) -> int:
        return self.pp * self.vpp


def group_order(group: int, lane: Lane, micro_batches: range, schedule: str) -> list[tuple[bool, int, int]]:
    """(forward, stage, micro-batch) in the order of one of a lane's groups of ranks.

    1F1B holds at most pp - group micro-batches (Narayanan et al. 2021, arXiv:2104.04473, figure 4); GPipe holds
    all of them (Huang et al. 2019, arXiv:1811.06965). The interleaved schedule takes pp micro-batches through
    every stage of the group before the next pp, and holds at most 2 (pp - group - 1) + (vpp - 1) pp + 1 passes
    (the former, section 2.2; NVIDIA/Megatron-LM:megatron/core/pipeline_parallel/schedules.py, core 0.16).
    """
    assert lane.vpp == 1 or len(micro_batches) % lane.pp == 0, (lane, micro_batches)
    passes = range(len(micro_batches) * lane.vpp)
    if schedule == "gpipe":
        ahead = len(passes)
    elif lane.vpp == 1:
        ahead = lane.pp - group - 1
    else:
        ahead = 2 * (lane.pp - group - 1) + (lane.vpp - 1) * lane.pp
    return [
        (forward, *_pass(number, group, lane, micro_batches, forward))
        for forward, number in _alternating(passes, ahead, lane.backward)
    ]


def _pass(number: int, group: int, lane: Lane, micro_batches: range, forward: bool) -> tuple[int, int]:
    """(stage, micro-batch) of the group's pass `number` that way: pp micro-batches through stage after stage."""
    if lane.vpp == 1:
        return group, micro_batches[number]
    turn, within = divmod(number, lane.pp * lane.vpp)
    chunk, position = divmod(within, lane.pp)
    chunk = chunk if forward else lane.vpp - 1 - chunk
    return chunk * lane.pp + group, micro_batches[turn * lane.pp + position]


def in_rounds(front: list[Lane], trunk: Lane, head: Lane | None, rounds: int, schedule: str) -> list[Task]:
    """For components that share ranks: per round the front's forwards, the trunk's pipeline, the front's backward.

    Args:
        front: the components before the trunk, each after those that it reads.
        head: the one behind it, of one stage; its micro-batches are a multiple of the trunk's.
    """
    tasks: list[Task] = []
    for number in range(rounds):
        tasks += _front(front, rounds, number, forward=True)
        tasks += _merged(_trunk_streams(trunk, head, _share(trunk, rounds, number), schedule, {}))
        tasks += _front(front, rounds, number, forward=False)
    return tasks


def in_lockstep(
    front: list[Lane], trunk: Lane, head: Lane | None, rounds: int, schedule: str
) -> list[Task]:
    """For a front on ranks of its own: it works on later rounds while the trunk works on earlier ones.

    The front runs 1F1B over rounds, like a stage before the trunk's first: it is ahead by the rounds that fill
    the trunk's pipeline, of which the interleaved schedule begins 2 pp micro-batches before it gives one back.
    """
    fill = trunk.pp if trunk.vpp == 1 else 2 * trunk.pp
    ahead = rounds if schedule == "gpipe" else -(-fill // (trunk.micro_batches // rounds))
    wanted = any(lane.backward for lane in front)
    stream: list[Item] = []
    fed: dict[int, Task] = {}
    for forward, number in _alternating(range(rounds), ahead, wanted):
        tasks = _front(front, rounds, number, forward)
        share = _share(trunk, rounds, number)
        stream.append(Item(tuple(tasks), () if forward else (Task(trunk.name, 0, share[-1], False),)))
        if forward:
            fed |= dict.fromkeys(share, tasks[-1])
    return _merged([stream, *_trunk_streams(trunk, head, range(trunk.micro_batches), schedule, fed)])


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
    trunk: Lane, head: Lane | None, micro_batches: range, schedule: str, fed: dict[int, Task]
) -> list[list[Item]]:
    """The order of each group of ranks, and of the head.

    Args:
        fed: by micro-batch, the front's task after which it can start.
    """
    streams = [_head_stream(head, trunk, micro_batches)] if head else []
    judged = {stream.index: item.tasks[-1] for item in streams[0] for stream in item.needs} if head else {}
    return streams + [
        [
            _trunk_item(trunk, Task(trunk.name, stage, index, forward), fed if forward else judged)
            for forward, stage, index in group_order(group, trunk, micro_batches, schedule)
        ]
        for group in range(trunk.pp)
    ]


def _head_stream(head: Lane, trunk: Lane, micro_batches: range) -> list[Item]:
    """What the head does with each of the trunk's micro-batches: its own, forward and backward in turn."""
    ways = (True, False) if head.backward else (True,)
    return [
        Item(
            tuple(
                Task(head.name, 0, own, way) for own in _share(head, trunk.micro_batches, index) for way in ways
            ),
            (Task(trunk.name, trunk.stages - 1, index, True),),
        )
        for index in micro_batches
    ]


def _trunk_item(trunk: Lane, task: Task, others: dict[int, Task]) -> Item:
    """
    Args:
        others: by micro-batch, the task of another component after which its first stage can start, or backward
            its last one; empty: it waits for none.
    """
    before = task.stage - 1 if task.forward else task.stage + 1
    if 0 <= before < trunk.stages:
        return Item((task,), (Task(trunk.name, before, task.index, task.forward),))
    return Item((task,), (others[task.index],) if others else ())


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
