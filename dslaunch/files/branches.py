"""What the branches of an `if` or a `case` leave in a script's variables, and which of them is taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from dslaunch.files.flags import Word

_BRANCHING = ("case", "if")
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_SPECIAL = frozenset("*?[\\")


@dataclass(frozen=True)
class Value:
    """What a variable holds, as the words it makes without quotes."""

    words: tuple[Word, ...]
    array: bool = False

    @property
    def text(self) -> str:
        """As it stands in quotes."""
        return " ".join(word.text for word in self.words)

    @property
    def texts(self) -> tuple[str, ...]:
        """Its words, wherever they are written."""
        return tuple(word.text for word in self.words)

    @property
    def known(self) -> bool:
        """Whether all of it is told."""
        return all(word.known for word in self.words)


@dataclass(frozen=True, order=True)
class Choice:
    """One branch of one block, or one pass of one loop."""

    at: int
    """Offset of the word that opens the block."""
    index: int


AS_TOLD = Choice(-1, 0)
"""Of each block whose conditions are told the branch that is taken."""


@dataclass(frozen=True)
class Branch:
    """One that has ended."""

    values: Mapping[str, Value | None]
    """Of each variable that it sets; None: it isn't set after all."""
    leaves: bool
    """The script ends in it, or what follows isn't reached."""
    taken: bool | None
    """None: not told."""


@dataclass
class Block:
    """An open block."""

    word: str = ""
    """`if`, `case`, `for` ...; empty for a shell of its own."""
    at: int = 0
    before: dict[str, Value | None] = field(default_factory=dict)
    """What its variables were before it."""
    own: set[str] = field(default_factory=set)
    """Those that the branch which is open sets."""
    ended: list[Branch] = field(default_factory=list)
    setters: dict[str, list[Branch]] = field(default_factory=dict)
    """The branches that set a variable, by its name."""
    past: bool | None = False
    """Whether a branch above the one that is open is taken: False: none is."""
    leaves: bool = False
    taken: bool | None = None
    """Whether the branch that is open is taken."""
    whole: bool = False
    """Some branch is always taken: there is an `else`, or a pattern `*`."""
    open_to_caller: bool = False
    """A condition asks for a value that the script gives by default."""

    @property
    def branches(self) -> bool:
        """Whether it is an `if` or a `case`."""
        return self.word in _BRANCHING

    def ends(self, values: Mapping[str, Value | None]) -> None:
        """The branch that is open has ended with these values of all variables."""
        held = {name: values.get(name) for name in self.own}
        branch = Branch(held, self.leaves, self.taken)
        for name in held:
            self.setters.setdefault(name, []).append(branch)
        self.ended.append(branch)
        self.own, self.leaves, self.taken = set(), False, None

    def decided(self, holds: bool | None) -> None:
        """What the condition of the branch that is open comes to, where those above it leave it the word."""
        if self.past is True:
            self.taken = False
        elif holds is False or self.past is False:
            self.taken = holds
        self.past = True if self.taken else self.past if holds is False else self.past or None

    def possible(self, name: str, *, told: bool) -> list[Value | None]:
        """What a variable may hold behind it; nothing where no branch goes on.

        Args:
            told: a condition that is told decides; otherwise it may be changed, as what it asks for is for that.
        """
        goes_on = [each for each in self.setters.get(name, ()) if not each.leaves]
        if told and (taken := [each for each in self.taken_surely if not each.leaves]):
            return [each.values.get(name, self.before[name]) for each in taken]
        found = [each.values[name] for each in goes_on]
        left = not self.whole or len(found) < self.going_on
        return [*found, self.before[name]] if left else found

    @cached_property
    def going_on(self) -> int:
        """How many of its branches do, once all have ended."""
        return sum(not each.leaves for each in self.ended)

    @cached_property
    def taken_surely(self) -> tuple[Branch, ...]:
        """The branch that is taken whatever isn't told, once all have ended."""
        return tuple(each for each in self.ended if each.taken)


def holds(words: Sequence[Word]) -> bool | None:
    """Whether a test such as `[ 2 -gt 1 ]` holds; None where that isn't told."""
    texts = [word.text for word in words]
    if not all(word.known for word in words) or (texts[:1], texts[-1:]) not in ((["["], ["]"]), (["[["], ["]]"])):
        return None
    inner = texts[1:-1]
    if len(inner) == 2 and inner[0] in ("-n", "-z"):
        return bool(inner[1]) is (inner[0] == "-n")
    if len(inner) != 3:
        return None
    left, sign, right = inner
    if sign in _NUMBERS and left.isdecimal() and right.isdecimal():
        return _NUMBERS[sign](int(left), int(right))
    if sign in ("=", "==", "!=") and not _SPECIAL.intersection(right):
        return (left == right) is (sign != "!=")
    return None


def matches(subject: Word, patterns: Sequence[Word]) -> bool | None:
    """Whether one of a case's patterns is that of its word; None where that isn't told."""
    if any(each.text == "*" for each in patterns):
        return True
    if not subject.known or not all(each.known for each in patterns):
        return None
    return any(fnmatchcase(subject.text, each.text) for each in patterns)


def choices(block: Block) -> Iterator[tuple[Choice, Mapping[str, Value]]]:
    """Each branch behind which the script goes on, with what it sets."""
    if block.branches and (values := {
        name: value for each in block.taken_surely if not each.leaves
        for name, value in each.values.items() if value and value.known
    }):  # fmt: skip
        yield AS_TOLD, values
    told = bool(block.taken_surely) and not block.open_to_caller
    for index, each in enumerate(block.ended if block.branches and not told else ()):
        values = {name: value for name, value in each.values.items() if value and value.known}
        if values and not each.leaves and (each.taken is not False or block.open_to_caller):
            yield Choice(block.at, index), values


@dataclass
class Picked:
    """The variables of a branch that is looked at, while the script goes on behind it."""

    values: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    """What they hold, and what is seen of them where the same condition may have been asked again."""
    depth: int = 0
    """How many blocks are open where they hold."""

    def show(self, variables: dict[str, Value], shown: bool) -> None:
        """Sets those that nothing else has set since."""
        for name, (value, otherwise) in self.values.items():
            now, then = (otherwise, value) if shown else (value, otherwise)
            if variables.get(name) is now:
                variables[name] = then
