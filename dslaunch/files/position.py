"""Where something stands in a text."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

Path = tuple[str | int, ...]
"""The way to a value in a document: keys of objects and indices of lists."""


@dataclass(frozen=True, order=True)
class Position:
    """Line and column, both counted from 1; a column counts characters."""

    line: int
    column: int
    file: str = field(default="", compare=False)
    """Where it is another file than the one that is spoken of."""


START = Position(1, 1)


@dataclass(frozen=True)
class Problem:
    """What keeps a text from being read as its kind."""

    rule: str
    """The rule that reports it: file.syntax | file.duplicate-key | file.unread."""
    message: str
    at: Position


def lines_of(text: str) -> list[str]:
    """The lines without their ends, broken where `Lines` breaks them: at `\\n` alone, as for bash and sbatch.

    `str.splitlines` breaks at form feeds and at Unicode's separators too, and would number what follows otherwise.
    """
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


class Lines:
    """Turns offsets of one text into positions."""

    def __init__(self, text: str) -> None:
        self._starts = [0]
        at = text.find("\n")
        while at >= 0:
            self._starts.append(at + 1)
            at = text.find("\n", at + 1)

    def position(self, offset: int) -> Position:
        """The position of the character at `offset`."""
        line = bisect_right(self._starts, offset)
        return Position(line, offset - self._starts[line - 1] + 1)

    def offset(self, at: Position) -> int:
        """The offset of the character at `at`."""
        return self._starts[at.line - 1] + at.column - 1


def dotted(path: Path) -> str:
    """`zero_optimization.offload_param.device`, `passes[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
