"""megatron_args.txt: one flag of Megatron with its values on each line, quoted for the shell."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from dslaunch.files.position import START, Position, Problem


@dataclass(frozen=True)
class Flag:
    """One line."""

    name: str
    """Such as `--num-layers`."""
    values: tuple[str, ...]
    at: Position


@dataclass(frozen=True)
class MegatronArgs:
    """The flags in order, and the lines that are none."""

    flags: tuple[Flag, ...]
    problems: tuple[Problem, ...] = field(default=())

    def value(self, name: str) -> str | None:
        """The last value given to `name`, or None; argparse lets the last one win."""
        values = [flag.values[-1] for flag in self.flags if flag.name == name and flag.values]
        return values[-1] if values else None

    def position(self, name: str) -> Position:
        """Where `name` stands last; the start of the file where it doesn't."""
        return next((flag.at for flag in reversed(self.flags) if flag.name == name), START)


def parse(text: str) -> MegatronArgs:
    """The flags in `text`; blank lines and lines that begin with # are passed over."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        at = Position(number, len(line) - len(line.lstrip()) + 1)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            problems.append(Problem("file.syntax", f"the shell's quotes are not closed ({error})", at))
            continue
        if words and words[0].startswith("-"):
            name, equals, value = words[0].partition("=")
            flags.append(Flag(name, (value, *words[1:]) if equals else tuple(words[1:]), at))
        elif words:
            problems.append(Problem("file.syntax", f"{words[0]!r} is no flag: each line begins with one", at))
    return MegatronArgs(tuple(flags), tuple(problems))
