"""Ranks of a benchmark as processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any


def run_ranks(context: BaseContext, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """A process for each of `arguments`; returns when all have ended well, and leaves none behind otherwise."""
    ranks = [context.Process(target=target, args=given) for given in arguments]  # type: ignore[attr-defined]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join()
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.exitcode == 0 for rank in ranks), [rank.exitcode for rank in ranks]
