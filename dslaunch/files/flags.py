"""Words of a command line, and the options that they make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dslaunch.files.gaps import is_gap
from dslaunch.files.position import START, Position, Problem

_PAIRS = frozenset({"-mca", "--mca", "-gmca", "--gmca"})
"""Options of mpirun with two values."""


def is_told(text: str) -> bool:
    """Whether nothing is left in `text` that only a running shell, or who uses the file, would fill in."""
    return "$" not in text and "`" not in text and not is_gap(text)


@dataclass(frozen=True)
class Word:
    """One word of a command, its quotes removed and the variables that its script sets filled in."""

    text: str
    """`$X` and `$(...)` stay where the script does not tell them."""
    at: Position
    """Where it is written: in the array or the variable that it comes from."""
    known: bool = True
    """False: the shell fills something in that isn't told, or splits it into more words."""
    late: bool = False
    """In single quotes, or escaped, for a shell inside, as in `srun bash -c '...'`: filled in on each node."""


@dataclass(frozen=True)
class Flag:
    """One option with its values."""

    name: str
    """As typed: `--num-layers`, `-N`."""
    values: tuple[str, ...]
    at: Position
    joined: bool = False
    """Its first value is typed behind an equals sign."""


@dataclass(frozen=True)
class Arguments:
    """Options in their order."""

    flags: tuple[Flag, ...]
    words: tuple[Word, ...] = ()
    """Those that stand before any option and belong to none."""
    complete: bool = True
    """False: there may be more, from a variable that isn't told."""
    problems: tuple[Problem, ...] = ()

    def flag(self, *names: str) -> Flag | None:
        """The last option with one of these names, or None; argparse lets the last one win."""
        return next((flag for flag in reversed(self.flags) if flag.name in names), None)

    def has(self, *names: str) -> bool:
        """Whether one of these options is given."""
        return not self.names.isdisjoint(names)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that are given."""
        return frozenset(flag.name for flag in self.flags)

    def value(self, *names: str) -> str | None:
        """The last value given to one of these options, or None."""
        values = [flag.values[-1] for flag in self.flags if flag.name in names and flag.values]
        return values[-1] if values else None

    def position(self, *names: str) -> Position:
        """Where the last of these options stands; the start of the file where none does."""
        flag = self.flag(*names)
        return flag.at if flag else START


def script_arguments(words: Sequence[Word]) -> Arguments:
    """Words as argparse reads them where its options aren't known: an option's values run to the next option."""
    flags: list[Flag] = []
    loose: list[Word] = []
    for word in words:
        if is_option(word.text):
            name, equals, value = word.text.partition("=")
            flags.append(Flag(name, (value,) if equals else (), word.at, joined=bool(equals)))
        elif flags and word.known:
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, word.text))
        elif flags:
            flags[-1] = _with_untold(flags[-1], word)
        else:
            loose.append(word)
    return Arguments(tuple(flags), tuple(loose), all(_is_one(words, i) for i in range(len(words))))


def launcher_options(
    words: Sequence[Word], switches: Collection[str], *, joined: bool = False
) -> tuple[Arguments, Sequence[Word]]:
    """The options up to the first word that is none, and the words from there on.

    Args:
        switches: options without a value; every other one takes a single value.
        joined: short options hold their value, as in `-N2` (srun), or stand together (`-lu`).
    """
    flags: list[Flag] = []
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "--":
        word = words[at]
        name, equals, value = word.text.partition("=")
        at += 1
        if joined and not name.startswith("--") and len(name) > 2:
            name, value, equals = name[:2], word.text[2:], "="
            if name in switches:
                flags += [Flag(f"-{letter}", (), word.at) for letter in word.text[1:]]
                continue
        if equals or name in switches:
            flags.append(Flag(name, (value,) if equals else (), word.at))
        else:
            count = 2 if name in _PAIRS else 1
            flags.append(Flag(name, tuple(word.text for word in words[at : at + count]), word.at))
            at += count
    return Arguments(tuple(flags)), words[at:]


def is_option(text: str) -> bool:
    """`--lr`, `-N`; no negative number."""
    return text.startswith("-") and len(text) > 1 and not text[1:2].isdigit() and text[1] != "."


def _with_untold(flag: Flag, word: Word) -> Flag:
    """A word behind an option is its first value, told or not; behind a value it may be options as well."""
    return flag if flag.values else Flag(flag.name, (word.text,), flag.at)


def _is_one(words: Sequence[Word], at: int) -> bool:
    """Whether this word is told, or the value of the option before it."""
    before = words[at - 1].text if at else ""
    return words[at].known or (is_option(before) and "=" not in before) or is_option(words[at].text)
