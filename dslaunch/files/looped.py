"""The loops of a script as its reader goes through them: what their variables hold, and between which places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dslaunch.files import blocks, loops
from dslaunch.files.lexer import Token
from dslaunch.files.loops import Passes
from dslaunch.files.variables import Variables

_PATTERN = re.compile(r"[*?\[]")
"""Names of files that the shell looks for."""


@dataclass
class _Block:
    """An open block of any kind."""

    word: str
    at: int
    name: str = ""
    """The variable of a `for`."""
    values: tuple[str, ...] = ()
    reaches: str = loops.UNTOLD
    held: list[int] = field(default_factory=list)
    """Indices of what holds up to its end."""


class Loops:
    """Fed with the words of blocks, in their order; `passes` has what came out."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.text = text
        self.variables = variables
        self.passes: list[Passes] = []
        self._open: list[_Block] = []
        self._ends = blocks.ends(text)

    def end(self, at: int) -> int | None:
        """The offset behind what closes the block that opens at this one."""
        return self._ends.get(at)

    def opens(self, word: str, at: int) -> None:
        """`for`, `if` and the like at this offset."""
        self._open.append(_Block(word, at))

    def over(self, name: str, words: Sequence[Token]) -> None:
        """`for NAME in WORDS`."""
        counted = loops.listed(
            (self.text[each.start : each.end] for each in words), self.variables.computed
        )
        if counted is None:
            found = self.variables.expand(words)
            told = all(word.known and not _PATTERN.search(word.text) for word in found)
            counted = (tuple(word.text for word in found), "") if told else ((), loops.UNTOLD)
        self._takes(name, *counted)

    def counts(self, at: int) -> int | None:
        """`for ((...))` at this offset: the offset behind its head; None where it counts nothing up by one."""
        found = loops.counted(self.text, at, self.variables.computed)
        if found is None:
            return None
        self._takes(*found[:3])
        return found[3]

    def _takes(self, name: str, values: tuple[str, ...], reaches: str) -> None:
        block = self._open[-1] if self._open else _Block("for", 0)
        block.name, block.values, block.reaches = name, values, reaches
        self.variables.goes_through(block.at, name, values if not reaches else ())

    def begins(self, at: int) -> None:
        """The `do` of a loop at this offset."""
        block = self._open[-1] if self._open else None
        end = self._ends.get(block.at) if block else None
        if block is None or end is None or block.word not in ("for", "until", "while"):
            return
        if block.name:
            self._holds(block, Passes(block.name, block.values, at, end, block.reaches))
        for name, places in loops.steps(self.text, at, end).items():
            if name != block.name:
                self._steps(block, name, at, end, places)

    def _steps(self, block: _Block, name: str, at: int, end: int, places: list[int]) -> None:
        """A variable to which each pass adds one."""
        before = self.variables.possible(name)
        inner = any(at < start < place <= close for place in places for start, close in self._ends.items())
        if len(before) != 1 or not before[0].isdecimal() or len(places) != 1 or inner:
            self.variables.forget(name)
            return
        values, reaches = loops.up_to(self.text, block.at, int(before[0]), name, self.variables.computed)
        if block.name and not block.reaches:
            first = int(before[0])
            values, reaches = tuple(str(first + each) for each in range(len(block.values))), ""
        elif not values:
            values, reaches = before, loops.UNTOLD
        self.variables.forget(name, values if not reaches and block.word == "for" else ())
        further = loops.UNTOLD if reaches else ""
        self._holds(block, Passes(name, values, at, places[0], reaches))
        self._holds(block, Passes(name, loops.stepped(values), places[0], end, further))

    def _holds(self, block: _Block, passes: Passes) -> None:
        block.held.append(len(self.passes))
        self.passes.append(passes)

    def closes(self, at: int) -> None:
        """A block ends at this offset."""
        for index in self._open.pop().held if self._open else ():
            self.passes[index] = replace(self.passes[index], end=min(self.passes[index].end, at))
