"""Which variables hold what in the blocks of a shell script, and behind them."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.files import branches
from dslaunch.files.branches import Block, Choice, Picked, Value
from dslaunch.files.expansions import BARE_NAME, OF_NODES, OF_PLATFORM, PASSES
from dslaunch.files.flags import Word
from dslaunch.files.position import Lines


class Scopes:
    """The variables of one script, at one place of it, with the blocks that are open there."""

    def __init__(self, text: str, chosen: Choice | None) -> None:
        self.text = text
        self.lines = Lines(text)
        self.values: dict[str, Value] = {}
        self._looped: dict[str, tuple[str, ...]] = {}
        self._chosen = chosen
        self._blocks: list[Block] = []
        self.choices: dict[Choice, Mapping[str, Value]] = {}
        """What each branch sets whose values the block leaves open, and each pass of a loop."""
        self._picked = Picked()
        self._by_default: set[str] = set()
        """Variables whose values the script gives where its caller doesn't."""

    @property
    def in_block(self) -> bool:
        """Inside an if, a loop, a case or a function."""
        return bool(self._blocks)

    @property
    def depth(self) -> int:
        """How many blocks are open."""
        return len(self._blocks)

    def enter(self, word: str = "", at: int = 0) -> None:
        """A block begins: what it sets may not be set.

        Args:
            word: `if`, `case` and the like.
            at: its offset.
        """
        self._shows(False)
        self._blocks.append(Block(word, at))

    def turn(self) -> None:
        """The next branch begins with what was set before the block."""
        block = self._blocks[-1]
        own = block.own
        block.ends(self.values)
        for name in own:
            before = block.before[name]
            self._looped.pop(name, None)
            if before is None:
                self.values.pop(name, None)
            else:
                self.values[name] = before

    def decide(self, holds: bool | None, asked: str, *, last: bool = False) -> None:
        """The condition of the branch that is open was read.

        Args:
            holds: what it comes to, where that is told.
            asked: its text.
            last: it is an `else`, or `*`.
        """
        block = self._blocks[-1]
        block.whole = block.whole or last
        block.decided(holds)
        named = {each[1] for each in BARE_NAME.finditer(asked)}
        block.open_to_caller = block.open_to_caller or bool(named & self._by_default)
        if block.taken is False:
            for name in named & self.values.keys():  # they are others where it is run
                self.forget(name)

    def exits(self, *, apart: bool) -> None:
        """The script ends here: what follows this branch isn't reached from it.

        Args:
            apart: it ends only where what stands before holds.
        """
        for block in self._blocks[-1:]:
            block.leaves = block.leaves or not apart
        self._picked.show(self.values, False)
        self._picked = Picked()

    def leave(self, *, empty: bool = False) -> None:
        """It ends: what it set isn't told from here on, unless all its branches agree, or one is surely taken.

        Args:
            empty: nothing stands between the last branch and the end.
        """
        block = self._blocks.pop()
        if not empty:
            block.ends(self.values)
        found = dict(branches.choices(block))
        self.choices |= found
        for name, before in block.before.items():
            self._remember(name)
            self._looped.pop(name, None)
            self.values[name] = self._behind(block, name, before)
        if self._chosen in found and self._chosen != branches.AS_TOLD:
            self._picks(found[self._chosen])
        else:
            self._shows(True)

    def undo(self) -> tuple[str, ...]:
        """A function's body ends, which its definition doesn't run: the variables that a call sets."""
        block = self._blocks[-1]
        self.turn()
        self._blocks.pop()
        self._shows(True)
        return tuple(block.before)

    def _behind(self, block: Block, name: str, before: Value | None) -> Value:
        """What stood before a block that added words stays, and there may be more."""
        told = self._chosen is not None
        possible = block.possible(name, told=told) if block.branches else [self.values.get(name), before]
        given = [each for each in possible if each is not None]
        if given and len(given) == len(possible) and all(each.texts == given[0].texts for each in given):
            return given[0]
        stays = before is not None and all(each.texts[: len(before.words)] == before.texts for each in given)
        kept = before.words if before is not None and stays else ()
        words = next((each.words for each in reversed(given) if each.words), ())
        marker = Word(f"${name}", words[-1].at if words else self.lines.position(0), known=False)
        return Value((*kept, marker), any(each.array for each in given))

    def _picks(self, values: Mapping[str, Value]) -> None:
        """The chosen branch is taken."""
        own = {
            name: value for name, value in values.items()
            if not OF_PLATFORM.match(name) and not (value.text == "1" and OF_NODES.fullmatch(name))
        }  # fmt: skip
        self._picked = Picked({name: (value, self.values[name]) for name, value in own.items()}, self.depth)
        self._shows(True)

    def _shows(self, shown: bool) -> None:
        """Between blocks the variables of the chosen branch are told."""
        if self.depth == self._picked.depth:
            self._picked.show(self.values, shown)

    def skips(self) -> None:
        """A loop leaves something out in one of its passes: which isn't told."""
        for block in self._blocks:
            for index in range(PASSES if block.word == "for" else 0):
                self.choices.pop(Choice(block.at, index), None)

    def goes_through(self, at: int, name: str, values: tuple[str, ...]) -> None:
        """A loop that opens at this offset gives a variable these values, one after the other."""
        self.forget(name, values)
        each = [Value((Word(value, self.lines.position(at)),)) for value in values if 1 < len(values) <= PASSES]
        found = {Choice(at, index): {name: value} for index, value in enumerate(each)}
        self.choices |= found
        if self._chosen in found:
            self.values |= found[self._chosen]

    def forget(self, name: str, values: tuple[str, ...] = ()) -> None:
        """The shell sets this variable to what isn't told: `for NAME in`, `read NAME`.

        Args:
            values: all that a loop gives it, one after the other.
        """
        if not name.isidentifier():
            return  # an option of `read`
        self._remember(name)
        self.values[name] = self._untold(name)
        self._looped[name] = values

    def _remember(self, name: str) -> None:
        if self._blocks:
            self._blocks[-1].before.setdefault(name, self.values.get(name))
            self._blocks[-1].own.add(name)

    def _untold(self, name: str) -> Value:
        return Value((Word(f"${name}", self.lines.position(0), known=False),))
