"""What a name may hold at a place of a script, where several assignments lead there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dslaunch.rules.scripts.tree import Script

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Block = tuple[int, ...]
"""The lists of statements around a place, from the outside in."""
_Place = tuple[int, int]
"""Line and column."""
_LAST: _Place = (sys.maxsize, 0)


@dataclass(frozen=True)
class _Binding:
    """One `NAME = value`."""

    value: ast.expr
    block: _Block
    at: _Place
    """Where it ends: what stands in it still sees the value before."""


def possible(script: Script, node: ast.expr, around: Sequence[ast.AST]) -> list[ast.expr]:
    """What an expression may be: of a name the values that reach it, of anything else itself.

    Only plain assignments are told; what a loop or an argument binds a name to isn't.

    Args:
        around: the nodes that the expression stands in, from the inside out.
    """
    if not isinstance(node, ast.Name):
        return [node]
    at = (node.lineno, node.col_offset)
    for scope in (*(each for each in around if isinstance(each, _Function)), script.python.tree):
        body = _body(scope)
        found = list(_bindings(body, node.id, ()))
        if found or node.id in _arguments(scope):
            return _reaching(found, _block(body, at, ()), at)
        at = _LAST
    return []


def _reaching(found: list[_Binding], block: _Block, at: _Place) -> list[ast.expr]:
    """Those before the place that no later one replaces: one in a block around it, or around the place."""
    before = [each for each in found if each.at < at]
    return [
        each.value for each in before
        if not any(
            each.at < later.at and (_holds(later.block, each.block) or _holds(later.block, block))
            for later in before
        )
    ]  # fmt: skip


def _holds(outer: _Block, inner: _Block) -> bool:
    return inner[: len(outer)] == outer


def _block(body: list[ast.stmt], at: _Place, around: _Block) -> _Block:
    """The innermost block that a place stands in."""
    here = (*around, id(body))
    inner = (each for statement in body for each in _blocks(statement) if each)
    return next((_block(each, at, here) for each in inner if _begin(each[0]) <= at < _end(each[-1])), here)


def _begin(node: ast.stmt) -> _Place:
    return node.lineno, node.col_offset


def _end(node: ast.stmt) -> _Place:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _bindings(body: list[ast.stmt], name: str, around: _Block) -> Iterator[_Binding]:
    here = (*around, id(body))
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                yield _Binding(statement.value, here, _end(statement))
        if not isinstance(statement, _Function | ast.ClassDef):
            for inner in _blocks(statement):
                yield from _bindings(inner, name, here)


def _blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a statement."""
    for field in ("body", "orelse", "finalbody"):
        inner = getattr(statement, field, None)
        if isinstance(inner, list):
            yield inner
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _body(scope: ast.AST) -> list[ast.stmt]:
    body = getattr(scope, "body", [])
    return body if isinstance(body, list) else []


def _arguments(scope: ast.AST) -> set[str]:
    nodes = ast.walk(scope.args) if isinstance(scope, _Function) else ()
    return {each.arg for each in nodes if isinstance(each, ast.arg)}
