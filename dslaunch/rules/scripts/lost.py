"""Collectives that write into what nobody holds: what was received is gone with the statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import OF_ACCELERATE, guards
from dslaunch.rules.scripts.objects import moved
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_INTO: Mapping[str, tuple[str, int]] = {
    "all_gather": ("tensor_list", 0), "all_gather_object": ("object_list", 0), "all_reduce": ("tensor", 0),
    "broadcast": ("tensor", 0), "broadcast_object_list": ("object_list", 0), "gather": ("gather_list", 1),
    "gather_object": ("object_gather_list", 1), "scatter_object_list": ("scatter_object_output_list", 0),
}  # fmt: skip
"""The argument that each fills on the ranks that receive."""
_COPIES = frozenset({"clone", "mean", "sum", "max", "min"})
"""Methods that make another tensor in any case; `.to`, `.cuda`, `.detach` and `.view` may give the same memory."""


_SENDS = re.compile(r"(?i)rank|src|source|root|main|master|first|leader|coordinator|process_index")


@rule("script.lost-result", severity="wrong", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def lost_result(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A collective that fills a list or tensor which is made in its call, and that no name holds."""
    for script in scripts(files):
        for call in script.calls:
            if not call.around or not isinstance(call.around[0], ast.Expr):
                continue
            if call.owner in ("torch.distributed", "deepspeed.comm") and call.method in _INTO:
                given = call.argument(*_INTO[call.method])
                if given is not None and _is_dropped(script, given, call.method) and not _is_source(script, call):
                    message = (
                        f"{call.method} writes into `{ast.unparse(given)}`, which nothing holds: what was "
                        "received is lost, and each rank goes on with its own."
                    )
                    yield script.hit(call, message, "Give the list or tensor a name first, and read that.")
            elif call.owner in script.accelerators and call.method in OF_ACCELERATE - {"wait_for_everyone"}:
                message = f"{call.owner}.{call.method} gives back what it has put together, and nothing takes it."
                yield script.hit(call, message, "Bind what it returns to a name.")


def _is_source(script: Script, call: Call) -> bool:
    """Whether it may be the part of the rank that sends: by a condition, or while others receive elsewhere.

    What is broadcast is read by all where its value is asked for by the rank in the same function.
    """
    if any(_SENDS.search(ast.unparse(node.test)) for node, _ in guards(call)):
        return True
    if not call.method.startswith("broadcast"):
        return False
    given = call.argument(*_INTO[call.method])
    sent = {each.id for each in ast.walk(given) if isinstance(each, ast.Name)} if given is not None else set()
    asked = _asked(script, call.function or script.python.tree)
    if not any(asked.get(name, call.node.lineno) < call.node.lineno for name in sent):
        return True
    return len([each for each in script.methods(call.method) if each.function is call.function]) > 1


def _asked(script: Script, function: ast.AST) -> dict[str, int]:
    """The names of a function whose values are asked for by the rank, with the first such line; kept."""
    kept: dict[ast.AST, dict[str, int]] = vars(script).setdefault("asked_by_rank", {})
    if function not in kept:
        found = kept.setdefault(function, {})
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.Assign):
                asks = node.test if isinstance(node, ast.If) else getattr(node.value, "test", None)
                if asks is not None and _SENDS.search(ast.unparse(asks)):
                    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
                    for each in names:
                        if isinstance(each.ctx, ast.Store):
                            found.setdefault(each.id, node.lineno)
    return kept[function]


def _is_dropped(script: Script, given: ast.expr, method: str) -> bool:
    """Whether an argument is made for the call alone, to be filled with what somebody may want."""
    of_objects = "object" in method
    if isinstance(given, ast.List):
        if of_objects:
            told = method == "broadcast_object_list" and all(isinstance(each, ast.Constant) for each in given.elts)
            return bool(given.elts) and not told
        return bool(given.elts) and all(_is_new(script, each) for each in given.elts)
    if isinstance(given, ast.ListComp):
        return of_objects or _is_new(script, given.elt)
    if isinstance(given, ast.BinOp):
        return of_objects or not (_is_number(given) or isinstance(given.left, ast.List))
    made = moved(given)
    return isinstance(made, ast.Call) and _is_copy(script, made)


def _is_new(script: Script, node: ast.expr) -> bool:
    """Whether an expression makes a tensor: `torch.zeros_like(x)`."""
    return isinstance(node, ast.Call) and script.name(node.func).startswith("torch.")


def _is_copy(script: Script, given: ast.Call) -> bool:
    if script.name(given.func) == "torch.tensor":
        return bool(given.args) and not _is_number(given.args[0])
    return isinstance(given.func, ast.Attribute) and given.func.attr in _COPIES


def _is_number(node: ast.expr) -> bool:
    """Whether no name stands in an expression: a first call that only tries the connection out."""
    return not any(isinstance(each, ast.Name | ast.Attribute) for each in ast.walk(node))
