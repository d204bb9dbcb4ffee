"""A shell or sbatch script: its directives, its commands and what they start. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dslaunch.files import blocks, slurm
from dslaunch.files.branches import Choice, Value
from dslaunch.files.commands import CommandLine, command_line
from dslaunch.files.flags import Word
from dslaunch.files.lexer import UnclosedError
from dslaunch.files.loops import Passes
from dslaunch.files.position import Position, Problem, lines_of
from dslaunch.files.reader import Command as Command
from dslaunch.files.reader import Reader
from dslaunch.files.shell import Assignment, assignments

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_STRAY = "bash stops at this character: a word that holds it needs quotes"
_COMPONENT = ("hetjob", "packjob")
"""What begins the next component of a heterogeneous job; packjob until SLURM 20.02."""
_COMMENT = re.compile(r"(?:[^#\"'\\]|\\.|\"[^\"]*\"|'[^']*'|[\"'\\])*")
"""A line up to the comment at its end."""
_OPTION = re.compile(r"(--[\w-]+|-[A-Za-z])(?:=|\s*(?!-))((?:\"[^\"]*\"|'[^']*'|[^\s#\"'])*)")


@dataclass(frozen=True)
class Directive:
    """One option on a `#SBATCH` line."""

    name: str
    """`--nodes`, `-N`."""
    value: str
    """Empty where there is none."""
    at: Position
    read: bool
    """False: it stands after the first command, where sbatch no longer looks."""
    component: int = 0
    """Of a heterogeneous job: lines `#SBATCH hetjob` above it."""
    given: bool = False
    """On the command line of sbatch, which another script has."""


@dataclass(frozen=True)
class ShellScript:
    """What a script says, in the order of its lines."""

    assignments: tuple[Assignment, ...]
    directives: tuple[Directive, ...]
    commands: tuple[Command, ...]
    settled: dict[str, str]
    """Variables with one value, set outside of conditions and told."""
    problems: tuple[Problem, ...] = ()
    first_words: tuple[tuple[str, Position], ...] = ()
    """Arrays of several words that stand as a word of a command without `[@]`."""
    declared: tuple[tuple[Word, ...], ...] = ()
    """The words behind each `export`, `declare` and the like, as typed."""
    arrays: Mapping[str, int] = field(default_factory=dict)
    """How many words each array has, set outside of conditions and told."""
    passes: tuple[Passes, ...] = ()
    """What the variables of its loops hold."""
    choices: Mapping[Choice, Mapping[str, Value]] = field(default_factory=dict)
    """Branches and passes of loops, and what each of them sets that isn't told without it."""

    @cached_property
    def launches(self) -> tuple[CommandLine, ...]:
        """The commands that start programs on ranks."""
        found = (
            command_line(c.words, c.at, c.environment, conditional=c.conditional) for c in self.commands
        )
        return tuple(launch for launch in found if launch is not None)

    def directive(self, *names: str) -> Directive | None:
        """The last directive with one of these names that sbatch reads for the job's first component, or None."""
        read = (each for each in reversed(self.directives) if each.read and not each.component)
        return next((each for each in read if each.name in names), None)

    def variable(self, name: str) -> str | None:
        """The value of a variable that is settled, or None."""
        return self.settled.get(name)


def parse(text: str, given: tuple[Directive, ...] = (), chosen: Choice | None = None) -> ShellScript:
    """The script in `text`; a quote that is not closed ends what is read of it, and is a problem.

    Args:
        given: options with which it is submitted.
        chosen: the branch that is taken of one block, or the pass of one loop that is looked at.
    """
    directives = (*_directives(text), *given)
    reader = Reader(text, _filled_by_slurm(directives), chosen)
    problems: tuple[Problem, ...] = ()
    try:
        reader.read()
    except UnclosedError as error:
        problems = (Problem("file.syntax", str(error), reader.lines.position(error.at)),)
    stray = (lines.position(at) for at in reader.variables.stray[:1] for lines in (reader.lines,))
    problems += tuple(Problem("file.syntax", _STRAY, at) for at in stray)
    if not problems and (wrong := blocks.fault(text)):
        problems = (Problem("file.syntax", wrong[0], reader.lines.position(wrong[1])),)
    values = reader.variables.values.items()
    settled = {name: value.text for name, value in values if value.known and not value.array}
    defined = reader.functions.defined()
    found = tuple(each for index, each in enumerate(reader.commands) if index not in defined)
    directives = tuple(each for each in directives if each.read or not _is_written(each, found))
    first_words, declared = tuple(reader.variables.first_words), tuple(reader.declared)
    arrays = {name: len(value.words) for name, value in values if value.known and value.array}
    passes = tuple(reader.loops.passes)
    own = assignments(text)
    choices = reader.variables.choices
    return ShellScript(own, directives, found, settled, problems, first_words, declared, arrays, passes, choices)


def _is_written(directive: Directive, commands: Sequence[Command]) -> bool:
    """Whether it stands in a heredoc: it is another script's."""
    bodies = (command.heredoc for command in commands if command.heredoc)
    return any(body.at.line <= directive.at.line <= body.at.line + body.text.count("\n") for body in bodies)


def _filled_by_slurm(directives: Sequence[Directive]) -> dict[str, str]:
    """The variables of a job that has one kind of node."""
    several = any(each.component for each in directives)
    return {} if several else slurm.variables({each.name: each.value for each in directives if each.read})


def _directives(text: str) -> Iterator[Directive]:
    """The options of each #SBATCH line; sbatch stops looking at the first line that is no comment."""
    read, component = True, 0
    for number, line in enumerate(lines_of(text), 1):
        match = _DIRECTIVE.match(line)
        component += match is not None and match[1].strip() in _COMPONENT
        if match is None:
            read = read and (not line.strip() or line.lstrip().startswith("#"))
            continue
        told = _COMMENT.match(line, match.start(1))
        assert told is not None
        for option in _OPTION.finditer(line, match.start(1), told.end()):
            if line[option.start() - 1] not in " \t":
                continue
            value = option[2].strip("\"'")
            yield Directive(option[1], value, Position(number, option.start(1) + 1), read, component)
