"""Output of many ranks on one stream: whole lines, each with the name of who wrote it."""

from __future__ import annotations

import re
from typing import BinaryIO

_LINE_END = re.compile(rb"(?<=[\n\r])")
_LONGEST = 1 << 16
"""Bytes of a line that is handed on before it has ended."""


class Lines:
    """Writes `NAME: line`; a progress bar's carriage return ends a line too."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._begun: dict[str, bytes] = {}

    def feed(self, name: str, data: bytes) -> None:
        """Hand on the lines that are whole now."""
        *whole, rest = _LINE_END.split(self._begun.get(name, b"") + data)
        if len(rest) > _LONGEST:
            whole, rest = [*whole, rest], b""
        self._begun[name] = rest
        self._write(name, whole)

    def finish(self, name: str) -> None:
        """Hand on what is left of a stream that has ended."""
        rest = self._begun.pop(name, b"")
        self._write(name, [rest] if rest else [])

    def say(self, text: str) -> None:
        """A line of dslaunch's own."""
        self._write("dslaunch", [text.encode(errors="replace")])

    def _write(self, name: str, lines: list[bytes]) -> None:
        for line in lines:
            text = line.rstrip(b"\r\n")
            self._out.write(b"%s: %s\n" % (name.encode(), text))
        self._out.flush()
