"""A script as it runs with one branch of an `if` or `case` taken, or in one pass of a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from dslaunch.errors import listed
from dslaunch.files import script
from dslaunch.files.branches import Choice
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Lines, Position
from dslaunch.rules.known import told
from dslaunch.rules.registry import SEVERITIES, Hit, Rule
from dslaunch.rules.settings import Settings

_MOST = 12
"""Branches and passes of one script that are looked at."""
_MOST_CHARACTERS = 200_000
"""Of scripts that are judged with all these readings, in all."""
_LONGEST = 100_000
"""Characters of a script; the longest launch script seen has 60,000."""
_SHORT, _NAMES = 40, 3
"""Characters of a value that is told, and how many are."""
_MANY = 8
"""Shell scripts, beyond which each stands for a run of its own."""
_FAILS = ("memory", "hang", "error")
"""What one branch may fail at by itself; what it passes over may be meant for another."""
_OF_SCRIPTS = "dslaunch.rules.scripts."
_OF_LAUNCHES = f"{_OF_SCRIPTS}arguments"
"""Of the rules on training scripts the one on what a launch hands to them."""
_OF_PASSES = ("accelerate.", "deepspeed.", "huggingface.", "megatron.", "scripts.arguments")
"""Whose rules look at one pass of a loop: for others it is the passes together that count."""


@dataclass(frozen=True)
class Reading:
    """A script with one choice made."""

    file: File
    outer: File
    said: str
    """What is chosen: `with TP=3 of line 12`."""
    of_loop: bool

    def beside(self, files: FileSet) -> FileSet:
        """It in the place of its script."""
        many = len(files.of("shell")) > _MANY
        others = (file for file in files.files if file is not self.outer and not (many and file.kind == "shell"))
        return FileSet((self.file, *others), files.folders)

    def asks(self, rule: Rule) -> bool:
        """Whether a rule may find more in it."""
        module = rule.check.__module__
        if self.of_loop:
            return module.removeprefix("dslaunch.rules.").startswith(_OF_PASSES)
        return not module.startswith(_OF_SCRIPTS) or module == _OF_LAUNCHES


def _readings(files: FileSet) -> Iterator[Reading]:
    """Of each script those in which a launch is another than in the script as a whole."""
    for file, own in files.scripts():
        if not own.choices or len(file.text) > _LONGEST or not own.launches:
            continue
        lines, given = Lines(file.text), tuple(each for each in own.directives if each.given)
        for choice, values in islice(sorted(own.choices.items(), key=lambda each: each[0]), _MOST):
            value = script.parse(file.text, given, choice)
            if _texts(value.launches) != _texts(own.launches):
                at = lines.position(max(choice.at, 0)).line
                places = {word.at.line for each in values.values() for word in each.words}
                short = [f"{name}={each.text}" for name, each in sorted(values.items()) if len(each.text) < _SHORT]
                names = listed(short, limit=_NAMES)
                said = f"with {names} (line {min(places, default=at)})" if short else f"in a branch of line {at}"
                inner = File(file.name, "shell", file.text, value, problems=value.problems, inside=True)
                yield Reading(inner, file, said, _is_pass(file, choice))


def _texts(launches: Sequence[CommandLine]) -> list[object]:
    return [
        (each.at, [(own.options.flags, own.program) for own in each.launchers], each.arguments.flags, each.script)
        for each in launches
    ]


def _is_pass(file: File, choice: Choice) -> bool:
    return choice.at >= 0 and file.text.startswith("for", choice.at)


def hits_in_branches(
    files: FileSet, settings: Settings, asked: Sequence[Rule], before: set[tuple[str, Hit]]
) -> Iterator[tuple[Rule, Hit]]:
    """What the rules say of a branch or a pass that they don't say of the script as a whole (`before`)."""
    places: dict[tuple[str, str, Position | None], int] = {}
    named = {each.id: each for each in asked}
    for rule_id, hit in before:
        _is_graver(places, named[rule_id], hit)
    if settings.size_from.startswith("from "):
        settings = replace(settings, world_size=None, nodes=None, ranks_per_node=None, size_from="")
    left = _MOST_CHARACTERS
    for reading in _readings(files):
        own = reading.beside(files)
        left -= sum(len(each.text) for each in own.of("shell"))
        if left < 0:
            return
        known = told(own, settings)
        for each in asked:
            for hit in each.check(None, own, known) if reading.asks(each) else ():
                if (hit.severity or each.severity) in _FAILS and _is_graver(places, each, hit):
                    yield each, replace(hit, message=f"{reading.said}: {hit.message}", edit=None)


def _is_graver(places: dict[tuple[str, str, Position | None], int], rule: Rule, hit: Hit) -> bool:
    """Whether nothing was said of its place by the rule, or what is less grave; keeps what is said now."""
    key, rank = (rule.id, hit.name, hit.at), SEVERITIES.index(hit.severity or rule.severity)
    graver = rank > places.get(key, -1)
    places[key] = max(rank, places.get(key, -1))
    return graver
