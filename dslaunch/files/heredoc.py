"""Text between `<<EOF` and `EOF`, and what the shell writes of it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product

from dslaunch.files.position import Lines, Position

PIECE = re.compile(r"\\(?P<escaped>[$`\\])|\$(?P<name>[A-Za-z_]\w*)|\$\{(?P<braced>[A-Za-z_]\w*)\}")
"""What the shell takes out of a text, or fills in."""
_UNTOLD = re.compile(r"[$`]")
_MOST = 6
"""Texts of one heredoc in a loop that are looked at."""


@dataclass(frozen=True)
class Written:
    """The text as the shell writes it."""

    text: str
    """Behind as many line feeds as there are lines above it in the script."""
    told: bool
    """Nothing is left that only a running shell would fill in."""
    source: str
    """The text before anything was filled in, behind the same line feeds."""
    start: Position
    """Of its first character."""
    moves: tuple[tuple[int, int], ...]
    """From which offset of `text` on, and which one of `source` that is."""

    def at(self, at: Position) -> Position:
        """Where what stands at `at` of the text is written in the script."""
        if not self.moves:
            return at
        offset = self._lines.offset(at)
        last = bisect_right(self.moves, (offset, len(self.source))) - 1
        if last < 0:
            return at
        new, old = self.moves[last]
        after = self.moves[last + 1][1] if last + 1 < len(self.moves) else len(self.source)
        return Lines(self.source).position(min(old + offset - new, after))

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.text)


@dataclass(frozen=True)
class Heredoc:
    """Text between `<<EOF` and `EOF`."""

    text: str
    at: Position
    """Of its first character."""
    expands: bool
    """The shell that reads the script fills in its variables; False where the delimiter is quoted."""
    values: Mapping[str, tuple[str, ...]]
    """What the variables in it hold, where that is told: several values of one that a loop goes through."""

    def written(self, others: Mapping[str, str] | None = None) -> Iterator[Written]:
        """What the shell makes of it: one text, or several of which each is written once.

        Args:
            others: values of variables that aren't told at its place, but elsewhere in the script.
        """
        if not self.expands:
            yield self._filled({})
            return
        several = {name: found for name, found in self.values.items() if len(found) > 1}
        one = {name: found[0] for name, found in self.values.items() if len(found) == 1}
        for chosen in islice(product(*several.values()), _MOST):
            yield self._filled({**(others or {}), **one, **dict(zip(several, chosen, strict=True))})

    def _filled(self, values: Mapping[str, str]) -> Written:
        above = "\n" * (self.at.line - 1)
        parts, moves, end = [above], [], 0
        size = len(above)
        for found in PIECE.finditer(self.text) if self.expands else ():
            new = found["escaped"] or values.get(found["name"] or found["braced"])
            if new is None:
                continue
            kept = self.text[end : found.start()]
            parts += [kept, new]
            size += len(kept)
            moves.append((size, len(above) + found.start()))
            size += len(new)
            end = found.end()
            moves.append((size, len(above) + end))
        text = "".join([*parts, self.text[end:]])
        told = not self.expands or not _UNTOLD.search(PIECE.sub(lambda found: _left(found, values), self.text))
        return Written(text, told, above + self.text, self.at, tuple(moves))


def _left(found: re.Match[str], values: Mapping[str, str]) -> str:
    """What stays where nothing tells the value."""
    return "" if found["escaped"] or (found["name"] or found["braced"]) in values else found[0]
