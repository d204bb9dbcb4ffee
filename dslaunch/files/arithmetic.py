"""`$((8*4))`: what a shell computes of whole numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_LENGTH = 200
"""Characters; a longer expression is no size of a training run."""


def whole_number(expression: str) -> int | None:
    """The value of an expression of whole numbers, or None where it holds anything else."""
    if len(expression) > _MAX_LENGTH:
        return None
    try:
        return _number(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
