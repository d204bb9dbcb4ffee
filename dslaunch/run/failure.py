"""What a failed attempt said of itself: the exception of the rank that failed first, and the step it came to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.run.records import RankRecord, first_failed, furthest, read_ranks

_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception))(?:: (?P<said>.*))?$")
_RUNTIME = re.compile(r"^dslaunch\.runtime: rank \d+ on \S+ failed while .*?: (?P<kind>\w+): (?P<said>.*)$")
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
_TAIL_BYTES = 2**20


@dataclass(frozen=True)
class Said:
    """An exception's last line."""

    kind: str
    """Its class, such as ValueError; empty where the rank said none."""
    text: str = ""

    def like(self, other: Said) -> bool:
        """Whether both are the same, but for numbers such as addresses and ranks."""
        return bool(self.kind) and (self.kind, _plain(self.text)) == (other.kind, _plain(other.text))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind or "no exception"


@dataclass(frozen=True)
class Failure:
    """How far an attempt came, and what its ranks said."""

    step: int
    """The first step that not every rank completed, counted from 1."""
    said: tuple[Said, ...]
    """Of the ranks that failed, the first to fail first; those that said nothing are left out."""
    ranks: tuple[int, ...]
    """The ranks that `said` is of."""


def failure_of(ranks: Path, logs: Path) -> Failure:
    """The failure of one attempt.

    Args:
        ranks: the folder of its ranks' records.
        logs: that of its logs.
    """
    records = read_ranks(ranks)
    found = [(each.rank, said) for each, said in _exceptions(records, logs) if said.kind]
    return Failure(furthest(records) + 1, tuple(said for _, said in found), tuple(rank for rank, _ in found))


def _exceptions(records: Sequence[RankRecord], logs: Path) -> Iterator[tuple[RankRecord, Said]]:
    for each in first_failed(records):
        path = logs / f"rank-{each.rank}.log"
        yield each, last_exception(path) if path.exists() else Said("")


def last_exception(path: Path) -> Said:
    """The last exception that a log ends a traceback with."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if match := _EXCEPTION.match(line) or _RUNTIME.match(line):
            return Said(match["kind"].rpartition(".")[2], (match["said"] or "").strip())
    return Said("")


def _plain(text: str) -> str:
    return _VARIES.sub("#", text)
