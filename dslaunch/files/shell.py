"""Assignments in shell scripts and environment files. Nothing is expanded or run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dslaunch.files.position import Position, lines_of

_ASSIGNMENT = re.compile(
    r"""(?:^|(?<=[\s;,])|(?<=-c\ ['"]))     # a word of its own, of `--export=ALL,NAME=value`, of `sh -c '`
        (?:--export=|--env=)?
        ([A-Za-z_][A-Za-z0-9_]*)=
        ("[^"\n]*"|'[^'\n]*'|[^\s;,"']*(?:,(?![A-Za-z_]\w*=)[^\s;,"']*)*)""",
    re.VERBOSE,
)
_COMMENT = re.compile(r"\s*#(?!SBATCH|PBS)")


@dataclass(frozen=True)
class Assignment:
    """NAME=value; the value without its quotes."""

    name: str
    value: str
    at: Position
    literal: bool
    """The value holds no expansion, or stands in single quotes."""


def assignments(text: str) -> tuple[Assignment, ...]:
    """Every NAME=value outside comments, exported or not, on `#SBATCH --export=` too."""
    found: list[Assignment] = []
    for number, line in enumerate(lines_of(text), 1):
        if not _COMMENT.match(line):
            told = line if line.startswith("#") else line[: _comment(line)]
            found += [_assignment(number, match) for match in _ASSIGNMENT.finditer(told)]
    return tuple(found)


def _comment(line: str) -> int:
    """Where a comment behind a command begins; the line's length where none does."""
    quote = ""
    for at, letter in enumerate(line):
        if letter == "#" and not quote and at and line[at - 1] in " \t":
            return at
        if letter in "\"'`" and (at == 0 or line[at - 1] != "\\"):
            quote = "" if quote == letter else quote or letter
    return len(line)


def _assignment(line: int, match: re.Match[str]) -> Assignment:
    raw = match[2]
    value = raw[1:-1] if raw[:1] in ("'", '"') else raw
    literal = raw.startswith("'") or not re.search(r"[$`]", raw)
    return Assignment(match[1], value, Position(line, match.start(1) + 1), literal)
