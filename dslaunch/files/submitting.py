"""Options on sbatch's own line: they come before those of the script that the line names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dslaunch.files import script
from dslaunch.files.flags import Flag, is_told, launcher_options
from dslaunch.files.position import Position
from dslaunch.files.script import Directive, ShellScript
from dslaunch.files.switches import SBATCH

_UNTOLD = "$"
_MOST = 20
"""Lines with sbatch in one script that are looked at."""


def overridden(scripts: Mapping[str, ShellScript], texts: Mapping[str, str]) -> dict[str, ShellScript]:
    """The scripts that a line of another submits with options, each as it then runs.

    Where several lines submit one script, an option that they give different values isn't told.

    Args:
        scripts: by their files' names.
        texts: theirs.
    """
    by_base: dict[str, list[str]] = {}
    for name in scripts:
        by_base.setdefault(_base(name), []).append(name)
    found: dict[str, list[list[Directive]]] = {}
    for name, each in scripts.items():
        for flags, named in _submitted(each):
            target = by_base.get(_base(named), [])
            if len(target) == 1 and target[0] != name:
                found.setdefault(target[0], []).append([_given(flag, name) for flag in flags])
    return {
        name: script.parse(texts[name], tuple(_agreed(lines))) for name, lines in found.items() if any(lines)
    }


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _submitted(own: ShellScript) -> Iterator[tuple[tuple[Flag, ...], str]]:
    """The options and the script of each line with sbatch."""
    lines = (command.words for command in own.commands if _base(command.words[0].text) == "sbatch")
    for words, _ in zip(lines, range(_MOST), strict=False):
        options, rest = launcher_options(words[1:], SBATCH, joined=True)
        if rest and rest[0].known and not options.has("--wrap"):
            yield options.flags, rest[0].text


def _given(flag: Flag, name: str) -> Directive:
    at = Position(flag.at.line, flag.at.column, name)
    return Directive(flag.name, flag.values[0] if flag.values else "", at, read=True, given=True)


def _agreed(lines: list[list[Directive]]) -> Iterator[Directive]:
    """Each option once; its value where all lines give the same."""
    last = {each.name: each for line in lines for each in line}
    for name, each in last.items():
        values = [next((own.value for own in reversed(line) if own.name == name), None) for line in lines]
        same = len(set(values)) == 1 and is_told(each.value)
        yield each if same else replace(each, value=_UNTOLD)
