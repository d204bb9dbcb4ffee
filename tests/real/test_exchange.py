"""What is sent is let go when its receiver has it: never waited for, and not kept until the step ends."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.real.parts import need

need("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dslaunch.runtime.exchange import Exchange  # noqa: E402
from dslaunch.runtime.meshes import make_meshes  # noqa: E402
from dslaunch.runtime.messages import PIPELINE, Step, step_of  # noqa: E402
from tests.real.hetero_draws import drawn  # noqa: E402
from tests.real.hetero_ranks import WORLD, Case, Layout, plan_of  # noqa: E402

TWIN = Case(
    Layout(dp=4, tp=2, zero=2), Layout(dp=8, zero=2), Layout(pp=2, dp=2, tp=2, micro_batches=12)
)  # fmt: skip


@dataclass
class Sent:
    """One tensor under way; to wait for it is a fault as long as its receiver could be waiting itself."""

    received: bool = False
    step_ends: bool = False

    def wait(self) -> None:
        assert self.received or self.step_ends, "waits for a message that nobody has taken yet"


@dataclass
class Wire:
    """The network of all ranks in one process: what was sent, by sender and receiver."""

    lines: dict[tuple[int, int], deque[Sent]]
    rank: int = 0

    def isend(self, _rows: Any, destination: int) -> Sent:
        self.lines[self.rank, destination].append(sent := Sent())
        return sent

    def recv(self, _rows: Any, source: int) -> None:
        self.lines[source, self.rank].popleft().received = True


def most_held(step: Step, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, int], list[Exchange]]:
    """By rank, the most messages that it held at once in a step that all ranks run, task by task."""
    wire = Wire(defaultdict(deque))
    monkeypatch.setattr(dist, "isend", wire.isend)
    monkeypatch.setattr(dist, "recv", wire.recv)
    device = torch.device("cpu")
    ranks = [Exchange(step, rank, torch.float32, device, lambda _: (1, 1)) for rank in range(WORLD)]
    most: dict[int, int] = defaultdict(int)
    for each in ranks:
        each.begin()
    for task in step.tasks:
        for rank, each in enumerate(ranks):
            wire.rank = rank
            for message in each.incoming[task]:
                each.take(message)
            for message in each.outgoing[task]:
                each.send(message, torch.zeros(len(message.samples), 1, 1))
            most[rank] = max(most[rank], sum(map(len, each._sending.values())))
    return most, ranks


@pytest.mark.parametrize("number", range(24))
def test_no_message_is_waited_for_before_it_is_taken(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(number, interleaved=number % 3 == 1, head=number % 3 == 2)
    _, ranks = most_held(step_of(plan_of(case), case.rounds), monkeypatch)
    for each in ranks:
        for line in each._sending.values():
            for sent in line:
                sent.work.step_ends = True
        each.end()
        assert not any(each._sending.values())


def test_a_component_waits_as_long_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives new groups a limit of their own: half an hour, or ten minutes under NCCL."""
    given: list[timedelta | None] = []

    def new_group(ranks: list[int], timeout: timedelta | None = None) -> list[int]:
        given.append(timeout)
        return ranks

    monkeypatch.setattr(dist, "new_group", new_group)
    grids = {name: part.grid for name, part in step_of(plan_of(TWIN)).parts.items()}
    assert make_meshes(grids, 0, timedelta(minutes=3)).keys() == grids.keys()
    assert set(given) == {timedelta(minutes=3)}


def test_a_pipeline_holds_what_is_in_flight_not_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(plan_of(TWIN))
    most, _ = most_held(step, monkeypatch)
    piped = [m for m in step.messages if m.edge == PIPELINE and m.source == 0 and m.destination != 0]
    others = [m for m in step.messages if m.edge != PIPELINE and m.source == 0 and m.destination != 0]
    assert len(piped) == 12
    assert most[0] <= len(others) + 3
    assert most[4] <= len([m for m in step.messages if m.source == 4 and m.edge != PIPELINE]) + 3
