"""What the ranks do that don't get to a call: the other branch of the condition about the rank."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator

from dslaunch.rules.scripts.guards import COLLECTIVES, guards, on_one_rank
from dslaunch.rules.scripts.tree import Call, Script

_KNOWN = frozenset({
    "torch", "numpy", "np", "wandb", "tqdm", "logger", "log", "self.logger", *sys.stdlib_module_names,
})  # fmt: skip
"""Modules and loggers of whose functions none but torch.distributed's is a collective."""
_HARMLESS = re.compile(
    r"debug|info|warning|warn|error|append|extend|format|join|items|keys|values|get|update|split|strip|item|to|cuda"
    r"|cpu|eval|train|exit|close|set_\w+|add_\w+|get_rank|get_world_size|is_\w+|print\w*|log\w*|write|mkdir|exists"
)
"""Methods that are no collective, whatever they are called on."""


def others_may_join(script: Script, call: Call) -> bool:
    """Whether the other ranks run something that this file doesn't show, or that has the same collective in it."""
    for node, first_branch in guards(call):
        tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        if any(on_one_rank(each) is not None for each in tests):
            other = node.orelse if first_branch else node.body
            if any(_may_meet(script, each, call.method, set()) for each in _calls(other)):
                return True
    return False


def _calls(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    return (node for each in statements for node in ast.walk(each) if isinstance(node, ast.Call))


def _may_meet(script: Script, node: ast.Call, method: str, seen: set[str]) -> bool:
    """Whether a call is the collective itself, calls it, or is of something that isn't known."""
    name = script.name(node.func)
    own = script.functions.get(name)
    if own is not None:
        inside = list(_calls(own.body)) if name not in seen else []
        return any(_may_meet(script, each, method, {*seen, name}) for each in inside)
    last = node.func.attr if isinstance(node.func, ast.Attribute) else name
    if last in COLLECTIVES:
        return method not in COLLECTIVES or last == method
    known = any(name == each or name.startswith(f"{each}.") for each in _KNOWN) or hasattr(builtins, name)
    return not known and not _HARMLESS.fullmatch(last)
