"""Samples that are read ahead: the same ones, once each, and before they are asked for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from dslaunch.planfile import Plan
from dslaunch.run.processes import identify
from tests.golden.cases import planned
from tests.real.parts import need

need("torch")

import torch  # noqa: E402

from dslaunch.runtime.data import Batch  # noqa: E402
from dslaunch.runtime.reading import by_thread, read_ahead  # noqa: E402

PER_STEP = 8


class Counted:
    """Notes what is read, and fails from sample 40 on."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []
        self.threads: set[str] = set()
        self.second = threading.Event()

    def at(self, numbers: Iterable[int]) -> Batch:
        wanted = tuple(numbers)
        if wanted[0] >= 40:
            raise OSError("no such shard")
        self.read.append(wanted)
        self.threads.add(threading.current_thread().name)
        if wanted == (8, 9):
            self.second.set()
        tokens = torch.tensor([wanted])
        return Batch(tokens, tokens, tokens)


def test_the_next_step_is_read_before_it_is_asked_for_and_nothing_twice() -> None:
    data = Counted()
    ahead = by_thread(data, PER_STEP)
    assert ahead.at([0, 1]).tokens.tolist() == [[0, 1]]
    assert data.second.wait(10)
    ahead.at(iter([0, 1]))
    ahead.at([4, 5])
    ahead.at([8, 9])
    ahead.at([12, 13])
    assert sorted(data.read)[:4] == [(0, 1), (4, 5), (8, 9), (12, 13)]
    assert len(set(data.read)) == len(data.read)
    assert len(data.threads) == 1


def test_how_long_a_step_waited_for_its_samples_is_known() -> None:
    class Slow(Counted):
        def at(self, numbers: Iterable[int]) -> Batch:
            time.sleep(0.05)
            return super().at(numbers)

    ahead = by_thread(Slow(), PER_STEP)
    ahead.at([0, 1])
    assert ahead.waited_s > 0.04


def test_a_step_that_does_not_follow_is_read_when_it_is_asked_for() -> None:
    ahead = by_thread(Counted(), PER_STEP)
    ahead.at([0, 1])
    assert ahead.at([24, 25]).tokens.tolist() == [[24, 25]]


def test_what_cannot_be_read_is_told_where_it_is_asked_for() -> None:
    ahead = by_thread(Counted(), PER_STEP)
    ahead.at([32, 33])
    with pytest.raises(OSError, match="no such shard"):
        ahead.at([40, 41])


class Read:
    """Rows [n, 1] of the samples' numbers, and which process read them; fails from sample 40 on."""

    def at(self, numbers: Iterable[int]) -> Batch:
        wanted = list(numbers)
        if wanted[0] >= 40:
            raise OSError("no such shard")
        rows = torch.tensor(wanted)[:, None]
        return Batch(rows, rows, rows, more={"process": torch.tensor(os.getpid())})


def opened(_plan: Plan) -> Read:
    """What `data.path` names below."""
    return Read()


def test_processes_read_and_end_with_the_rank() -> None:
    plan, _, _ = planned("recipe=vla_tiny", "data.workers=2", f"data.path={__name__}:opened")
    ahead = read_ahead(replace(plan, global_batch=PER_STEP))
    pairs = [(0, 1), (2, 3), (8, 9), (10, 11)]
    batches = [ahead.at(pair) for pair in pairs]
    assert [tuple(batch.tokens[:, 0].tolist()) for batch in batches] == pairs
    readers = {int(batch.more["process"]) for batch in batches}
    assert os.getpid() not in readers
    with pytest.raises(OSError, match="no such shard"):
        ahead.at((40, 41))
    ahead.close()
    limit = time.monotonic() + 60
    while any(map(identify, readers)):
        assert time.monotonic() < limit
        time.sleep(0.1)
