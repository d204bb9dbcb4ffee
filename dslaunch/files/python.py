"""A Python file as a syntax tree; never imported or run."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property

from dslaunch.files.fstrings import downgraded
from dslaunch.files.position import Position, Problem, lines_of


@dataclass(frozen=True)
class PythonScript:
    """One Python file."""

    tree: ast.Module
    """Without statements where the text is no Python of this interpreter's version."""
    text: str
    problems: tuple[Problem, ...] = ()

    @cached_property
    def _lines(self) -> list[str]:
        """The lines as Python counts them: a form feed ends none."""
        return re.split(r"\r\n|[\r\n]", self.text)

    def at(self, node: ast.expr | ast.stmt) -> Position:
        """Where a node begins. The tree counts bytes of a line, a position characters."""
        line = self._lines[node.lineno - 1] if not self.text.isascii() else ""
        column = len(line.encode()[: node.col_offset].decode(errors="replace")) if line else node.col_offset
        return Position(node.lineno, column + 1)


def parse(text: str) -> PythonScript:
    """The tree of `text`, and what keeps it from being read."""
    empty = ast.Module([], [])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PythonScript(_tree(text.removeprefix("\ufeff")), text)
    except SyntaxError as error:
        return PythonScript(empty, text, (_problem(error, text),))
    except (RecursionError, MemoryError):
        problem = Problem("file.syntax", "nested deeper than Python reads", Position(1, 1))
        return PythonScript(empty, text, (problem,))


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        older = downgraded(text) if sys.version_info < (3, 12) else None
        if older is None:
            raise
        return ast.parse(older)


_NEWER = re.compile(r"\s*(?:type\s+\w+\s*(?:\[.*)?=|(?:async\s+)?def\s+\w+\[|class\s+\w+\[)")
"""Types with parameters, since Python 3.12."""


def _problem(error: SyntaxError, text: str) -> Problem:
    """An error; no more than unread where a newer Python than this one reads it."""
    at = Position(error.lineno or 1, error.offset or 1)
    line = lines_of(text)[at.line - 1 : at.line]
    if sys.version_info < (3, 12) and line and _NEWER.match(line[0]):
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Problem("file.unread", f"written for Python 3.12, and dslaunch runs under {here}", at)
    return Problem("file.syntax", f"no Python: {error.msg}", at)
