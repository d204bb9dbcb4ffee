"""A shell or sbatch script: its directives, its commands and what they start. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dslaunch.files import blocks, slurm
from dslaunch.files.commands import CommandLine, command_line
from dslaunch.files.flags import Word
from dslaunch.files.heredoc import PIECE, Heredoc
from dslaunch.files.lexer import Token, UnclosedError, tokens
from dslaunch.files.looped import Loops
from dslaunch.files.loops import Passes
from dslaunch.files.position import Lines, Position, Problem
from dslaunch.files.shell import Assignment, assignments
from dslaunch.files.switches import REMOTE
from dslaunch.files.variables import Variables

_OPENS = {"if", "for", "while", "until", "case", "{", "select"}
_CLOSES = {"fi", "done", "esac", "}"}
_TURNS = {"elif", "else"}
_PASSED = {"then", "do", "!", "time", "in"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_AS_NUMBER = re.compile(r"-\w*i\w*")
_SPLITS_AGAIN = {"eval"}
_WITH_BRACKETS = {"case", "for", "function", "select"}
_SHELLS = re.compile(r"(?:.*/)?(?:ba|z|da)?sh")
_COMMAND_OPTION = re.compile(r"-\w*c")
_ALL_ARGUMENTS = frozenset({"$@", "$*", "${@}", "${*}"})
_REDIRECTION = re.compile(r"\d*[<>&].*")
_NAME_VALUE = re.compile(r"[A-Za-z_]\w*\+?=")
_FEWER_NODES = re.compile(r"-[Nnr]\d*(?![\w-])|--n(?:odes|tasks)\b")
"""Options of srun with which a step is smaller than its job."""
_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_STRAY = "bash stops at this character: a word that holds it needs quotes"
_COMPONENT = ("hetjob", "packjob")
"""What begins the next component of a heterogeneous job; packjob until SLURM 20.02."""
_OPTION = re.compile(r"(--[\w-]+|-[A-Za-z])(?:=|\s*(?!-))((?:\"[^\"]*\"|'[^']*'|[^\s#\"'])*)")


@dataclass(frozen=True)
class Command:
    """A simple command, with the variables filled in that its script sets."""

    words: tuple[Word, ...]
    """The first is the program."""
    at: Position
    environment: tuple[Assignment, ...]
    """NAME=value in front of it."""
    heredoc: Heredoc | None
    conditional: bool
    """It stands in an if, a loop, a case or a function."""
    background: bool = False
    """`&` ends it."""


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


def parse(text: str, given: tuple[Directive, ...] = ()) -> ShellScript:
    """The script in `text`; a quote that is not closed ends what is read of it, and is a problem.

    Args:
        given: options with which it is submitted.
    """
    directives = (*_directives(text), *given)
    reader = _Reader(text, _filled_by_slurm(directives))
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
    found = tuple(reader.commands)
    directives = tuple(each for each in directives if each.read or not _is_written(each, found))
    first_words, declared = tuple(reader.variables.first_words), tuple(reader.declared)
    arrays = {name: len(value.words) for name, value in values if value.known and value.array}
    passes = tuple(reader.loops.passes)
    own = assignments(text)
    return ShellScript(own, directives, found, settled, problems, first_words, declared, arrays, passes)


class _Reader:
    """Goes through the tokens once, following blocks and variables."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.text = text
        self.lines = Lines(text)
        self.variables = Variables(text, environment)
        self.loops = Loops(text, self.variables)
        self.commands: list[Command] = []
        self.declared: list[tuple[Word, ...]] = []
        self._words: list[Token] = []
        self._in_test = False
        """Between `[[` and `]]`."""
        self._in_pattern = False
        """Between `in` or `;;` of a case and its `)`."""
        self._cases = 0

    def read(self) -> None:
        """Every command up to the end."""
        redirected = False
        behind = 0
        for token in tokens(self.text):
            raw = self.text[token.start : token.end]
            if token.start < behind:
                continue
            if token.kind == "heredoc":
                self._attach(token)
            elif token.kind == "word":
                if not redirected:
                    self._word(token, raw)
                redirected = False
            elif token.kind == "operator" and _REDIRECTION.fullmatch(raw) and raw not in ("&", "&&"):
                redirected = True
            else:
                if raw == "(" and self._is_stray(token):
                    self.variables.stray.append(token.start)
                behind = self._counted(raw)
                self._end(raw)
        self._end("\n")

    def _counted(self, raw: str) -> int:
        """The offset behind the head of `for ((...))`, whose first bracket this is; else 0."""
        alone = raw == "(" and len(self._words) == 1
        return (self.loops.counts(self._words[0].start) or 0) if alone else 0

    def _is_stray(self, bracket: Token) -> bool:
        """Whether `(` stands among a command's words, where bash expects none."""
        words = self._words
        head = self.text[words[0].start : words[0].end] if words else ""
        glob = self.text[bracket.start - 1] in "?*+@!$"
        line = self.text.rfind("\n", 0, bracket.start) + 1
        gap = "<" in self.text[line : bracket.start]  # NAME=<some words (such)>
        return len(words) > 1 and not (self._in_test or self._in_pattern or glob or gap or head in _WITH_BRACKETS)

    def _word(self, token: Token, raw: str) -> None:
        """Words of blocks are taken up where a command may begin; the rest is the command's."""
        first = not self._words
        self._in_test = raw == "[[" or (self._in_test and raw != "]]")
        if first and raw in _OPENS:
            self.variables.enter()
            self.loops.opens(raw, token.start)
            self._cases += raw == "case"
            if raw in ("for", "select", "case"):
                self._words.append(token)
        elif first and raw in _CLOSES and self.variables.in_block:
            self.variables.leave()
            self.loops.closes(token.end)
            self._cases -= raw == "esac"
            self._in_pattern = False
        elif first and raw in _TURNS and self.variables.in_block:
            self._turn()
        elif not (first and raw in _PASSED):
            self._words.append(token)
        elif raw == "do":
            self.loops.begins(token.end)

    def _turn(self) -> None:
        self.variables.leave()
        self.variables.enter()

    def _end(self, raw: str) -> None:
        """A command ends at this operator or newline."""
        words, self._words = self._words, []
        head = self.text[words[0].start : words[0].end] if words else ""
        if head == "case":
            self._in_pattern = True
        elif head in ("for", "select"):
            if len(words) > 1:
                name = self.text[words[1].start : words[1].end]
                self.loops.over(name, words[3:]) if head == "for" else self.variables.forget(name)
        elif self._in_pattern:
            self._in_pattern = raw != ")"
        elif raw == "(" and len(words) == 1:
            pass  # NAME ( ) { : a function, whose braces follow
        elif words:
            self._command(words, background=raw == "&")
        if raw in (";;", ";&", ";;&") and self._cases:
            self._turn()
            self._in_pattern = True

    def _command(self, words: Sequence[Token], *, background: bool) -> None:
        """An assignment changes variables; anything else is kept."""
        names = [self._is_assignment(token) for token in words]
        head = self.text[words[0].start : words[0].end]
        if all(names) or head in _DECLARES:
            for token in words:
                self.variables.assign(token)
            raws = [self.text[token.start : token.end] for token in words[1:]]
            if head in _DECLARES and any(_AS_NUMBER.fullmatch(raw) for raw in raws):
                for raw in raws:
                    self.variables.forget(raw.partition("=")[0])  # bash calculates what is set from here on
            if head in _DECLARES:
                self.declared.append(tuple(self._typed(token) for token in words[1:]))
            return
        if head == "read":
            for token in words[1:]:
                self.variables.forget(self.text[token.start : token.end])
        front = names.index(False)
        expanded = tuple(self._expanded(words[front:]))
        if not expanded:
            return
        at = self.lines.position(words[front].start)
        environment = tuple(self._environment(token) for token in words[:front])
        within = self.variables.in_block
        self.commands.append(Command(expanded, at, environment, None, within, background))

    def _typed(self, token: Token) -> Word:
        return Word(self.text[token.start : token.end], self.lines.position(token.start))

    def _expanded(self, words: Sequence[Token]) -> Iterator[Word]:
        """The words; what eval or `bash -c` reads once more is parted at its blanks."""
        resplit, before = False, ""
        self.variables.of_step = any(_FEWER_NODES.match(self.text, each.start) for each in words)
        for token in words:
            raw = self.text[token.start : token.end]
            resplit = resplit or before in _SPLITS_AGAIN
            inner = raw[:1] in "\"'" and _COMMAND_OPTION.fullmatch(before) and self._shell_runs(words, token)
            head = self.text[words[0].start : words[0].end]
            remote = raw[:1] in "\"'" and head in REMOTE and token == words[-1]
            found = self.variables.expand([token], resplit=resplit or bool(inner) or remote)
            if inner and not resplit:
                yield from self._with_rest(found, words[words.index(token) + 1 :])
                return
            yield from found
            before = raw

    def _with_rest(self, inside: Sequence[Word], behind: Sequence[Token]) -> Iterator[Word]:
        """The words that a shell inside reads; what follows its text are its $0, and from $1 on its "$@"."""
        rest = self.variables.expand(behind[1:])
        for word in inside:
            yield from rest if word.text.strip('"') in _ALL_ARGUMENTS and behind else (word,)

    def _shell_runs(self, words: Sequence[Token], at: Token) -> bool:
        """Whether `bash` or the like stands two words before `at`."""
        index = words.index(at)
        return index > 1 and _SHELLS.fullmatch(self.text, words[index - 2].start, words[index - 2].end) is not None

    def _is_assignment(self, token: Token) -> bool:
        return _NAME_VALUE.match(self.text, token.start, token.end) is not None

    def _environment(self, token: Token) -> Assignment:
        name, _, _ = self.text[token.start : token.end].partition("=")
        start = token.start + len(name) + 1
        (word,) = self.variables.expand([Token("word", start, token.end)]) or (Word("", Position(1, 1)),)
        return Assignment(name, word.text, self.lines.position(token.start), word.known)

    def _attach(self, token: Token) -> None:
        """A heredoc belongs to the last command."""
        if self.commands:
            body = self.text[token.start : token.end]
            names = {found["name"] or found["braced"] for found in PIECE.finditer(body)}
            values = {name: told for name in names if name and (told := self.variables.possible(name))}
            heredoc = Heredoc(body, self.lines.position(token.start), token.expands, values)
            self.commands[-1] = replace(self.commands[-1], heredoc=heredoc)


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
    for number, line in enumerate(text.splitlines(), 1):
        match = _DIRECTIVE.match(line)
        component += match is not None and match[1].strip() in _COMPONENT
        if match is None:
            read = read and (not line.strip() or line.lstrip().startswith("#"))
            continue
        for option in _OPTION.finditer(line, match.start(1)):
            if line[option.start() - 1] not in " \t":
                continue
            value = option[2].strip("\"'")
            yield Directive(option[1], value, Position(number, option.start(1) + 1), read, component)
