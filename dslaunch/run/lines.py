"""Files of JSON lines that a running program adds to, such as metrics.jsonl; whatever they hold ends no run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def row_of(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for half a line, or anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def number(value: object) -> float | None:
    """A JSON number; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class Lines:
    """One file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were added; a file that a resumed run cut is read on from its new end."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size <= self._offset:
            self._offset = size
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            *lines, _ = stream.read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in lines)
        yield from filter(None, map(row_of, lines))
