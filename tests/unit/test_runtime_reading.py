"""Samples that are read ahead: the same ones, once each, and before they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from tests.real.parts import need

need("torch")

import torch  # noqa: E402

from dslaunch.runtime.data import Batch  # noqa: E402
from dslaunch.runtime.reading import ReadAhead  # noqa: E402

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
    ahead = ReadAhead(data, PER_STEP)
    assert ahead.at([0, 1]).tokens.tolist() == [[0, 1]]
    assert data.second.wait(10)
    ahead.at(iter([0, 1]))
    ahead.at([4, 5])
    ahead.at([8, 9])
    ahead.at([12, 13])
    assert sorted(data.read)[:4] == [(0, 1), (4, 5), (8, 9), (12, 13)]
    assert len(set(data.read)) == len(data.read)
    assert len(data.threads) == 1


def test_a_step_that_does_not_follow_is_read_when_it_is_asked_for() -> None:
    ahead = ReadAhead(Counted(), PER_STEP)
    ahead.at([0, 1])
    assert ahead.at([24, 25]).tokens.tolist() == [[24, 25]]


def test_what_cannot_be_read_is_told_where_it_is_asked_for() -> None:
    ahead = ReadAhead(Counted(), PER_STEP)
    ahead.at([32, 33])
    with pytest.raises(OSError, match="no such shard"):
        ahead.at([40, 41])
