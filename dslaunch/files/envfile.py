"""`.deepspeed_env`, in DeepSpeed's grammar (deepspeed/launcher/runner.py main, 0.19.8): no shell reads it."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.files.position import Position, lines_of


@dataclass(frozen=True)
class EnvLine:
    """One line: comments and blank ones count, as DeepSpeed passes over none."""

    name: str
    """Empty where the line has no `=`: DeepSpeed raises ValueError."""
    value: str
    """With its quotes: DeepSpeed keeps them."""
    at: Position
    text: str


def parse(text: str) -> tuple[EnvLine, ...]:
    """The lines in their order."""
    return tuple(_line(number, line) for number, line in enumerate(lines_of(text), 1))


def _line(number: int, line: str) -> EnvLine:
    at = Position(number, len(line) - len(line.lstrip()) + 1)
    name, equals, value = line.partition("=")
    return EnvLine(name.strip() if equals else "", value.strip() if equals else "", at, line.strip())
