"""Hostfiles, in DeepSpeed's grammar (deepspeed/launcher/runner.py `_parse_hostfile`, 0.19.8)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dslaunch.files.position import lines_of

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)(.*)")


@dataclass(frozen=True)
class HostLine:
    """One line that is neither blank nor a comment."""

    line: int
    """Counted from 1."""
    text: str
    host: str = ""
    """Empty where DeepSpeed rejects the line."""
    slots: int = 0
    rest: str = ""
    """What follows the number: DeepSpeed ignores it."""


def parse(text: str) -> tuple[HostLine, ...]:
    """The lines that DeepSpeed reads as hosts, good and bad."""
    stripped = ((number, line.strip()) for number, line in enumerate(lines_of(text), 1))
    return tuple(_line(number, line) for number, line in stripped if line and not line.startswith("#"))


def _line(number: int, text: str) -> HostLine:
    match = _ENTRY.match(text)
    # More than 9 digits are no count of GPUs, and Python refuses to read thousands of them.
    if match is None or len(match[2]) > 9:
        return HostLine(number, text)
    return HostLine(number, text, match[1], int(match[2]), match[3].strip())
