"""Functions of a shell script: where their bodies stand, and what a call hands to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from dslaunch.files.branches import Value

MOST = 100_000
"""Characters of bodies that a script's calls read in all."""
_DEEPEST = 4
"""Calls within calls."""


@dataclass(frozen=True)
class Function:
    """One that is defined by `NAME() {` or `function NAME {`."""

    start: int
    """Offset behind the brace that opens it."""
    end: int
    """Of the brace that closes it."""
    commands: range
    """Indices of the commands that its definition has, for any call."""


@dataclass
class Call:
    """A call whose body is being read."""

    name: str
    depth: int
    """Blocks that are open where it stands."""
    background: bool
    may_return: bool = False
    """What follows in its body may not be run."""
    before: dict[str, Value | None] = field(default_factory=dict)
    """What its own variables were before it."""


@dataclass
class Functions:
    """Those of one script, and the calls that are being followed."""

    found: dict[str, Function] = field(default_factory=dict)
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The variables that each sets."""
    called: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    _pending: str = ""
    """A name behind which the body's brace is to come."""
    _open: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Name, offsets and first command of each definition that is being read."""
    _left: int = MOST

    @property
    def call(self) -> Call | None:
        """The innermost call."""
        return self.calls[-1] if self.calls else None

    def named(self, name: str) -> None:
        """`NAME()` or `function NAME` was read."""
        self._pending = name

    def opens(self, start: int, end: int | None, commands: int) -> None:
        """A `{` was read; `end` is the offset behind its `}`, `commands` how many came before it."""
        if self._pending and end is not None and not self.calls:
            self._open.append((self._pending, start, end, commands))
        self._pending = ""

    def closes(self, end: int, commands: int) -> str:
        """A block's end was read: the name of the function that it ends; empty where it ends none."""
        if self.calls or not self._open or self._open[-1][2] != end:
            return ""
        name, start, _, first = self._open.pop()
        self.found[name] = Function(start, end - 1, range(first, commands))
        return name

    def take(self, name: str) -> Function | None:
        """The function, if this call of it is followed."""
        function = self.found.get(name)
        if function is None or len(self.calls) >= _DEEPEST or any(each.name == name for each in self.calls):
            return None
        self._left -= function.end - function.start + 1
        return function if self._left >= 0 else None

    def defined(self) -> frozenset[int]:
        """Indices of commands that stand in a function which is called: what the calls run is told beside them."""
        return frozenset(index for name in self.called for index in self.found[name].commands)
