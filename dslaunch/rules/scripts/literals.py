"""A dictionary that a script writes out, read as a DeepSpeed JSON is, with the places of its keys in the script.

What isn't written out is left open: a value that is computed, a key that is set later. Several fillings of what is
open (`fillings`) stand for all it may become: only what holds of each of them holds of the dictionary.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dslaunch.engines.deepspeed_keys import Key, Section, table
from dslaunch.files.position import Path, Position
from dslaunch.rules.scripts.tree import Script

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_MAX_DEPTH = 20
_LARGEST_BASE, _LARGEST_EXPONENT = 1024, 40
"""Of a power that is worked out: nobody writes more, and more may take long."""
_CHANGES = frozenset({"clear", "pop", "popitem", "setdefault", "update"})
_SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "bool": (True, False), "int": (1, 2, 3, 0), "plain_int": (1, 2, 3, 4), "float": (1, 0.5, 2, 0),
    "str": ("x", "none"),
}  # fmt: skip
"""Values that a key of this type may come to hold."""
_ANYTHING: tuple[Any, ...] = (None, True, {"enabled": True}, 8, "x")
_FILLINGS = 5


class _OpenError(Exception):
    """The value isn't written out."""


@dataclass
class Written:
    """A dictionary as far as it is written out; `value` lacks what is open."""

    value: dict[str, Any]
    positions: dict[Path, Position]
    """Of each key, the open ones too."""
    open: set[Path] = field(default_factory=set)
    """Keys whose value isn't written out."""
    extended: bool = False
    """It may hold more keys than are seen."""


def written(script: Script, node: ast.Dict, name: str) -> Written:
    """The dictionary at `node`, and what the script does later to the variable `name` that holds it."""
    reader = _Reader(script)
    found = Written(reader.members(node, ()), reader.positions, reader.open, reader.extended)
    for path, at in _changes(script, name) if name else ():
        if not path:
            found.extended = True
            continue
        found.positions.setdefault(path, at)
        found.open = {each for each in found.open if each[: len(path)] != path} | {path}
        _take_out(found.value, path)
    return found


def fillings(found: Written) -> Iterator[dict[str, Any]]:
    """The dictionary with the open keys left out, then with values of several kinds in their places."""
    if not found.open:
        yield found.value
        return
    for number in range(-1, _FILLINGS):
        value = _copy(found.value)
        for path in sorted(found.open, key=str):
            if number >= 0 or not is_read(path):
                _put(value, path, _sample(*_key(path), max(number, 0)))
        yield value


class _Reader:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.positions: dict[Path, Position] = {}
        self.open: set[Path] = set()
        self.extended = False

    def members(self, node: ast.Dict, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = self.script.constant(key)
            if key is None or not isinstance(name, str):
                self.extended = True
                continue
            here = (*path, name)
            self.positions[here] = self.script.python.at(key)
            try:
                found[name] = self.read(value, here)
            except _OpenError:
                self.open.add(here)
        return found

    def read(self, given: ast.expr, path: Path) -> Any:
        """The value of an expression; raises _OpenError where it isn't written out."""
        node = self.script.bound(given)
        if len(path) > _MAX_DEPTH or node is None:
            raise _OpenError
        if isinstance(node, ast.Dict):
            changed = isinstance(given, ast.Name) and next(_changes(self.script, given.id), None)
            if changed:
                raise _OpenError
            return self.members(node, path)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.elts)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        return _number(node)


def _number(node: ast.expr) -> Any:
    """Arithmetic on plain numbers; raises _OpenError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        try:
            if isinstance(node.op, ast.Pow) and abs(left) <= _LARGEST_BASE and 0 <= right <= _LARGEST_EXPONENT:
                return left**right
            if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](left, right)
        except ArithmeticError:
            raise _OpenError from None
    raise _OpenError


def _changes(script: Script, name: str) -> Iterator[tuple[Path, Position]]:
    """What the script sets in a dictionary after it was written: the keys, () where that isn't told."""
    for node in script.nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            root, path = _subscripted(node)
            if root == name:
                yield path, script.python.at(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            yield (), script.python.at(node)
    for call in script.calls:
        function = call.node.func
        if isinstance(function, ast.Attribute) and function.attr in _CHANGES:
            root, path = _subscripted(function.value)
            if root == name:
                yield path, script.python.at(call.node)
        passed = {each.id for each in call.node.args if isinstance(each, ast.Name)}
        if isinstance(function, ast.Name) and function.id in script.functions and name in passed:
            yield (), script.python.at(call.node)


def _subscripted(node: ast.expr) -> tuple[str, Path]:
    """`a["b"]["c"]` is ("a", ("b", "c")); a key that isn't written out ends the path."""
    keys: list[str | None] = []
    while isinstance(node, ast.Subscript):
        key = node.slice
        keys.insert(0, key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None)
        node = node.value
    told = keys[: keys.index(None)] if None in keys else keys
    return (node.id if isinstance(node, ast.Name) else ""), tuple(key for key in told if key is not None)


def _key(path: Path) -> tuple[Section, Key | None]:
    """What the key table says of the key at `path`, and of the section that it stands in or under."""
    section = table().sections[""]
    for part in path[:-1]:
        key = section.keys.get(str(part))
        if key is None or key.type != "section":
            return section, None
        section = table().sections[section.below(key)]
    return section, section.keys.get(str(path[-1]))


def is_read(path: Path) -> bool:
    """Whether DeepSpeed has a key of this name in this place, and still takes it."""
    _, key = _key(path)
    return key is not None and not key.removed


def _sample(section: Section, key: Key | None, number: int) -> Any:
    """One of the values that a key may come to hold; of a section all keys, or none."""
    kind = key.type.partition("|")[0] if key is not None else ""
    if key is not None and kind == "section":
        inner = table().sections[section.below(key)]
        taken = {name: each for name, each in inner.keys.items() if not (each.removed or each.alias_of)}
        return {name: _sample(inner, each, number) for name, each in taken.items()} if number else {}
    values = (key.choices if key is not None else ()) or _SAMPLES.get(kind, _ANYTHING)
    return values[number % len(values)]


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _take_out(value: dict[str, Any], path: Path) -> None:
    for part in path[:-1]:
        value = value[str(part)] if isinstance(value.get(str(part)), dict) else {}
    value.pop(str(path[-1]), None)


def _put(value: dict[str, Any], path: Path, item: Any) -> None:
    for part in path[:-1]:
        inner = value.setdefault(str(part), {})
        if not isinstance(inner, dict):
            return
        value = inner
    value[str(path[-1])] = item
