"""Rows as columns: a line each where the output is piped, folded under their last column on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

_GAP = "  "
_WIDEST = 32
"""A longer cell is not what its column is aligned by, but moves the rest of its own line."""
_INDENT = 4
"""Of a line that goes on, where the last column is too narrow for words."""
_NARROW = 30


def width() -> int | None:
    """Characters of a line; None where the output is no terminal and COLUMNS is not set."""
    asked = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if asked else None


def lines(rows: Sequence[tuple[str, ...]], wide: int | None, *, cut: bool = False) -> list[str]:
    """One line for each of `rows`, which are equally long.

    Args:
        wide: characters of a line; what they do not hold goes to more lines.
        cut: leave out what they do not hold, and end with `...`.
    """
    if not rows:
        return []
    pads = [_pad([row[i] for row in rows]) for i in range(len(rows[0]) - 1)]
    start = sum(pads) + len(_GAP) * len(pads)
    found = []
    for row in rows:
        cells = [cell.ljust(pad) for cell, pad in zip(row, pads, strict=False)]
        line = _GAP.join([*cells, row[-1]]).rstrip()
        if not wide or len(line) <= wide:
            found.append(line)
        elif cut:
            found.append(f"{line[: wide - 3].rstrip()}...")
        else:
            found += _folded(line, wide, start)
    return found


def side_by_side(rows: Sequence[tuple[str, ...]], wide: int | None) -> list[str]:
    """Columns that are read down: names, and things of equal rank, each cell folded inside its column."""
    pads = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if wide and sum(pads) + len(_GAP) * (len(pads) - 1) > wide:
        each = (wide - pads[0]) // (len(pads) - 1) - len(_GAP)
        pads[1:] = [max(_NARROW // 2, each)] * (len(pads) - 1)
    found = []
    for row in rows:
        cells = [textwrap.wrap(cell, pad) for cell, pad in zip(row, pads, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            found.append(_GAP.join(part.ljust(pad) for part, pad in zip(parts, pads, strict=True)).rstrip())
    return found


def _pad(cells: Sequence[str]) -> int:
    return max((len(cell) for cell in cells if len(cell) <= _WIDEST), default=_WIDEST)


def _folded(line: str, wide: int, start: int) -> list[str]:
    indent = " " * (start if wide - start >= _NARROW else _INDENT)
    return textwrap.wrap(line, wide, subsequent_indent=indent, break_on_hyphens=False)
