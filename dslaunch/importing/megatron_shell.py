"""The little of a shell's language that training scripts steer their arguments with: conditions and arithmetic."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dslaunch.files.arithmetic import whole_number

_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_ARGUMENT = re.compile(r"\$(?:\d|\{\d\}|[@*])")
"""The script's own arguments: conditions are told as if it had none."""
_REFERENCE = re.compile(r"\$\{?(\w+)\}?")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_COMPARISONS: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


@dataclass
class _Block:
    """An open `if` or `case`."""

    reads: bool
    """Whether the branch at hand is executed."""
    done: bool
    """Whether one of its branches has been, or none can be."""
    subject: str | None = None
    """What `case` compares."""
    doubt: str = ""
    """The condition of the branch at hand, where the script does not tell it."""


class Branches:
    """Follows if, elif, else, fi, case and esac; a condition that cannot be told is taken as true.

    A `case` on what the script does not set, such as its own arguments, has no branch that is read.
    """

    def __init__(self, fill: Callable[[str], str]) -> None:
        self._fill = fill
        """Puts variables' values into a text."""
        self._open: list[_Block] = []

    @property
    def reads(self) -> bool:
        """Whether statements here are executed."""
        return all(block.reads for block in self._open)

    @property
    def doubts(self) -> list[str]:
        """Conditions taken as true on the way here."""
        return [block.doubt for block in self._open if block.doubt]

    def step(self, statement: str) -> str:
        """Takes up the words that open and close branches; what is left of the statement is returned."""
        word, _, rest = statement.partition(" ")
        if word in ("if", "case"):
            block = _Block(False, not self.reads, self._fill(rest) if word == "case" else None)
            self._open.append(block)
            return self._branch(block, rest) if word == "if" else ""
        if not self._open:
            return statement
        block = self._open[-1]
        if word in ("fi", "esac"):
            self._open.pop()
            return ""
        if block.subject is not None:
            return _pattern(block, statement)
        if word in ("elif", "else"):
            return self._branch(block, rest if word == "elif" else "")
        return rest if word == "then" else statement

    def _branch(self, block: _Block, text: str) -> str:
        """The branch that a condition, or an else, opens."""
        condition = text.partition(";")[0].strip()
        told = None if block.done else _told(_ARGUMENT.sub("", self._fill(condition))) if condition else True
        block.reads = not block.done and told is not False
        block.doubt = condition if block.reads and told is None else ""
        block.done = block.done or block.reads
        return ""


def _pattern(block: _Block, statement: str) -> str:
    """`7b | 8b) SIZE=8`: what stands after the pattern."""
    match = re.fullmatch(r"\(?\s*([^()]+)\)\s*(.*)", statement, re.DOTALL)
    if not match:
        return statement.removesuffix(";;")
    subject = (block.subject or "").removesuffix(" in").strip().strip("\"'")
    block.reads = not block.done and "$" not in subject
    block.reads = block.reads and any(
        fnmatchcase(subject, p.strip().strip("\"'")) for p in match[1].split("|")
    )
    block.done = block.done or block.reads
    return match[2].removesuffix(";;")


def _told(condition: str) -> bool | None:
    """`[ A = B ]`, `[[ -n A ]]`, numbers, `&&` and `||`; None where that is not enough to tell."""
    for sign, decide in (("||", any), ("&&", all)):
        if f" {sign} " in condition:
            parts = [_told(part.strip()) for part in _parts(condition, sign)]
            if None not in parts:
                return decide(part is True for part in parts)
            decisive = sign == "||"
            return decisive if decisive in parts else None
    match = re.fullmatch(r"\[\[?\s+(.*?)\s+\]\]?", condition)
    return _test(match[1]) if match and "$" not in match[1] else None


def _parts(condition: str, sign: str) -> Iterable[str]:
    inner = re.fullmatch(r"(\[\[?)\s+((?:(?!\]).)*)\s+(\]\]?)", condition)
    if inner:
        return (f"[ {part} ]" for part in inner[2].split(f" {sign} "))
    return condition.split(f" {sign} ")


def _test(text: str) -> bool | None:
    words = [word.strip("\"'") for word in text.split()]
    if words[0] == "!":
        told = _test(text.partition("!")[2].strip())
        return None if told is None else not told
    if words[0] in ("-n", "-z") and len(words) <= 2:
        return (words[0] == "-n") == bool("".join(words[1:]))
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _COMPARISONS:
        return _COMPARISONS[sign](left, right)
    if sign in _NUMBERS and left.isdigit() and right.isdigit():
        return _NUMBERS[sign](int(left), int(right))
    return None


def computed(text: str, variables: Mapping[str, str]) -> str:
    """`$((8*4))` as 32, wherever nothing but whole numbers and variables that hold them stand in it."""

    def value(match: re.Match[str]) -> str:
        bare = _REFERENCE.sub(r"\1", match[1])
        filled = _NAME.sub(lambda name: variables.get(name[0], name[0]), bare)
        number = whole_number(filled)
        return match[0] if number is None else str(number)

    return _ARITHMETIC.sub(value, text)


def simple_statements(lines: Iterable[str]) -> Iterator[str]:
    """`if A; then B` as `if A` and `B`: the words of branches stand first in what is yielded."""
    for line in lines:
        yield from re.split(r";\s*(?=(?:then|else|elif|fi)\b)", line)
