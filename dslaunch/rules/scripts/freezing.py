"""Which parts of a model a script freezes: by their names, by a part of its own, or all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

_PARAMETERS = re.compile(r"(?:named_)?parameters")
_KEEPS = frozenset({"to", "cuda", "bfloat16", "half", "float", "train", "compile"})
"""Methods, and functions, that give back the same parameters."""


@dataclass(frozen=True)
class State:
    """What trains of a model after some statements."""

    trains: bool = True
    """What most of it does."""
    mixed: bool = False
    words: str = ""
    """Where it is mixed: what the part is called, or the condition on its name."""
    line: int = 0


def states(body: Iterable[ast.stmt], model: str) -> State:
    """What trains of a model, a name, after statements that run one after the other."""
    state = State()
    for node in body:
        for each in _events(node, model):
            state = _after(state, each)
        if _rebinds(node, model):
            state = State()
    return state


def trains_later(node: ast.stmt, model: str) -> bool:
    """Whether a statement, or a branch of it, lets a part of a model train."""
    inner = [each for part in (node.body, node.orelse) for each in part] if isinstance(node, ast.If) else [node]
    return any(event.to is True for each in inner for event in _events(each, model))


@dataclass(frozen=True)
class _Event:
    """`requires_grad` is set of all of a model, or of a part; `to` is None where it depends on the name."""

    to: bool | None
    line: int
    part: str = ""


def _after(state: State, event: _Event) -> State:
    if not event.part and event.to is not None:
        return State(event.to)
    if event.to is not None and event.to == state.trains:
        return state
    return replace(state, mixed=True, words=event.part, line=event.line)


def _events(node: ast.stmt, model: str) -> Iterator[_Event]:
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Attribute):
        part = _part(node.iter.func.value, model)
        if part is not None and _PARAMETERS.fullmatch(node.iter.func.attr) and len(node.body) == 1:
            names = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
            yield from _in_loop(node.body[0], names, part)
    elif (found := _switched(node)) is not None:
        part, to = _part(found[0], model), _constant(found[1])
        if part is not None and to is not None:
            yield _Event(to, node.lineno, part)


def _in_loop(node: ast.stmt, names: set[str], part: str) -> Iterator[_Event]:
    """What the one statement of a loop over parameters does with each."""
    if isinstance(node, ast.If) and _mentions(node.test, names):
        for branch in (node.body, node.orelse):
            sets = [value for each in branch if (value := _set(each, names)) is not None]
            if sets and (to := _constant(sets[0])) is not None:
                yield _Event(to, node.lineno, ast.unparse(node.test))
    elif (value := _set(node, names)) is not None:
        to = _constant(value)
        if to is not None or _mentions(value, names):
            yield _Event(to, node.lineno, part if to is not None else ast.unparse(value))


def _set(node: ast.stmt, names: set[str]) -> ast.expr | None:
    """What `p.requires_grad = ...` or `p.requires_grad_(...)` sets."""
    if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
        return node.value if target.attr == "requires_grad" and ast.unparse(target.value) in names else None
    found = _switched(node)
    return found[1] if found is not None and ast.unparse(found[0]) in names else None


def _switched(node: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """What `X.requires_grad_(value)` is called on, and the value."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    given: ast.expr = call.args[0] if call.args else ast.Constant(True)
    return (call.func.value, given) if call.func.attr == "requires_grad_" else None


def _mentions(node: ast.expr, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _part(node: ast.expr, model: str) -> str | None:
    """`.vision.encoder` of `model.vision.encoder`, empty for the model; None for another's."""
    text = ast.unparse(node)
    return text[len(model) :] if text == model or text.startswith((f"{model}.", f"{model}[")) else None


def _constant(node: ast.expr) -> bool | None:
    return bool(node.value) if isinstance(node, ast.Constant) else None


def _rebinds(node: ast.stmt, model: str) -> bool:
    """Whether a model's name is bound to something else than itself, moved or cast."""
    if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != model:
        return False
    value = node.value
    kept = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in _KEEPS
    return not (kept and re.search(rf"\b{re.escape(model)}\b", ast.unparse(value)))
