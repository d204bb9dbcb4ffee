"""Which values the variable of a loop has, one pass after the other. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dslaunch.files.arithmetic import whole_number

UNTOLD = "?"
_MOST = 1000
"""Passes that are counted out."""
_SEQUENCE = re.compile(r"\"?(?:\$\(|`)\s*seq\s+(?P<words>[^()`]*(?:\(\([^()]*\)\)[^()`]*)*)[)`]\"?")
_BRACES = re.compile(r"\{(-?\d+)\.\.(-?\d+)\}")
_COUNTED = re.compile(
    r"""for\s*\(\(\s*(?P<name>\w+)\s*=(?P<first>[^;()]+);\s*(?P=name)\s*(?P<test><=?)(?P<last>[^;]+);
        \s*(?:(?P=name)\s*\+\+|\+\+\s*(?P=name)|(?P=name)\s*\+=\s*1)\s*\)\)""",
    re.VERBOSE,
)
"""`for ((i=0; i<N; i++))`."""
_WHILE = re.compile(
    r"""while\s+(?:\[\[?\s+"?\$\{?(?P<tested>\w+)\}?"?\s+-(?P<word>lt|le)\s+(?P<last>[^\s\]]+)\s+\]
      |\(\(\s*\$?\{?(?P<counted>\w+)\}?\s*(?P<sign><=?)\s*(?P<end>[^()]+?)\s*\)\))""",
    re.VERBOSE,
)
_STEP = re.compile(
    r"""\b(?P<set>\w+)=(?:\$\(\(\s*\$?\{?(?P=set)\}?\s*\+\s*1\s*\)\)|(?:\$\(|`)\s*expr\s+\$\{?(?P=set)\}?\s+\+\s+1\s*[)`])
      |(?:\(\(|\blet\s+["']?)\s*(?:(?P<more>\w+)\s*(?:\+\+|\+=\s*1\b)|\+\+\s*(?P<before>\w+))""",
    re.VERBOSE,
)
"""What adds one to a variable."""
_REFERENCE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?")

Fill = Callable[[str], str]
"""Fills in what is told of an expression, in which variables may stand without their `$`."""


@dataclass(frozen=True)
class Passes:
    """What a variable holds between two places of the script."""

    name: str
    values: tuple[str, ...]
    """In order; empty where that isn't told."""
    start: int
    """Offset from which on it holds."""
    end: int
    reaches: str = ""
    """Where the shell alone knows how far they go: the variable whose value is the last one, as `N` of `seq 1 $N`,
    or UNTOLD; `values` has the first."""


def counted(text: str, at: int, fill: Fill) -> tuple[str, tuple[str, ...], str, int] | None:
    """Name, values, what they reach, and the offset behind the head of a `for ((...))`; None if `at` has none."""
    found = _COUNTED.match(text, at)
    if found is None:
        return None
    values, reaches = _from_to(fill(found["first"]), fill(found["last"]), with_last=found["test"] == "<=")
    return found["name"], values, reaches, found.end()


def listed(words: Iterable[str], fill: Fill) -> tuple[tuple[str, ...], str] | None:
    """The values of a list as it is typed, and what they reach; None where it counts nothing up."""
    one = [*words]
    joined = " ".join(one)
    sequence = _SEQUENCE.fullmatch(joined)
    if sequence is not None:
        ends = re.findall(r"\$\(\([^()]*\)\)|\S+", sequence["words"])
        numbers = [fill(each.strip("\"'")) for each in ends if each not in ("-w", "-s")]
        if len(numbers) == 3 and numbers[1] == "1":
            del numbers[1]
        if len(numbers) > 2 or not numbers:
            return (), ""
        first = numbers[0] if len(numbers) == 2 else "1"
        return _from_to(first, numbers[-1], with_last=True)
    if len(one) == 1 and (braces := _BRACES.fullmatch(joined)):
        return _from_to(braces[1], braces[2], with_last=True)
    return None


def _from_to(first: str, last: str, *, with_last: bool) -> tuple[tuple[str, ...], str]:
    start, stop = whole_number(first), whole_number(last)
    if start is None:
        return (), ""
    if stop is None:
        name = _NAME.fullmatch(last.strip().strip("\"'"))
        return (str(start),), name[1] if name and with_last else UNTOLD
    stop += with_last
    return tuple(str(each) for each in range(start, stop)) if stop - start <= _MOST else (), ""


def up_to(text: str, at: int, start: int, name: str, fill: Fill) -> tuple[tuple[str, ...], str]:
    """What a variable that begins with `start` has in a `while` at `at` that tests it."""
    found = _WHILE.match(text, at)
    if found is None or name not in (found["tested"], found["counted"]):
        return (), ""
    with_last = found["word"] == "le" or found["sign"] == "<="
    return _from_to(str(start), fill(found["last"] or found["end"]), with_last=with_last)


def steps(text: str, start: int, end: int) -> dict[str, list[int]]:
    """Offsets behind what adds one to a variable, by its name."""
    found: dict[str, list[int]] = {}
    for each in _STEP.finditer(text, start, end):
        found.setdefault(each["set"] or each["more"] or each["before"], []).append(each.end())
    return found


def is_step(text: str, start: int, end: int) -> bool:
    """Whether the word there is `NAME=$((NAME + 1))`."""
    return _STEP.fullmatch(text, start, end) is not None


def stepped(values: tuple[str, ...]) -> tuple[str, ...]:
    """What they are with one more."""
    return tuple(str(int(each) + 1) for each in values)


def at(passes: Iterable[Passes], name: str, offset: int) -> Passes | None:
    """What the variable holds at this place of the script, of the innermost loop around it."""
    around = [each for each in passes if each.name == name and each.start <= offset < each.end]
    return max(around, key=lambda each: each.start, default=None)


def filled(word: str, passes: Iterable[Passes], offset: int) -> Passes | None:
    """What a word with one loop's variable in it is, pass by pass; None where it has none, or that isn't told."""
    text = _ARITHMETIC.sub(lambda found: "$((" + _NAME.sub(r"${\1}", found[1]) + "))", word)
    names = {found["bare"] or found["braced"] for found in _REFERENCE.finditer(text)}
    held = at(passes, next(iter(names)), offset) if len(names) == 1 else None
    if held is None or not held.values:
        return None

    def with_value(value: str) -> str:
        plain = _REFERENCE.sub(value, text)
        return _ARITHMETIC.sub(lambda found: str(number) if (number := whole_number(found[1])) is not None
                               else found[0], plain)  # fmt: skip

    alone = _REFERENCE.fullmatch(text) is not None
    reaches = held.reaches if alone or not held.reaches else UNTOLD
    return replace(held, values=tuple(map(with_value, held.values)), reaches=reaches)
