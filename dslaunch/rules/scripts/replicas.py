"""Training scripts that go past DistributedDataParallel, or change what it was built around."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.alone import handed_back
from dslaunch.rules.scripts.guards import function_of
from dslaunch.rules.scripts.tree import DDP, Call, Script, scripts
from dslaunch.rules.settings import Settings

_RAN = "torch 2.13, run on two ranks"
_FINDS = ("find_unused_parameters", "static_graph")
_NO_GRADIENTS = re.compile(r"no_grad|inference_mode")
_ROUNDS = 4
"""Assignments from a model's output to its loss that are followed."""


@rule("script.wrapper-bypassed", severity="wrong", raised_by="nobody", evidence=_RAN)
def bypassed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A loss of `model.module(...)`: DDP's own forward is passed by, and gradients are never averaged."""
    for script in scripts(files):
        wrapped = script.assigned(DDP) if not script.by_framework else set()
        within = _within(script, wrapped) if wrapped else {}
        for call in script.calls if wrapped else ():
            named = [each for each in within if f"{call.name}.".startswith(f"{each}.")]
            function = function_of(call) or script.python.tree
            name, scope = within[named[0]] if named else ("", None)
            if scope is not None and scope is not function:
                continue
            calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
            called = name and any(ast.unparse(each.func) == name for each in calls)
            if not name or called or _without_gradients(call) or not _is_trained_on(script, function, call):
                continue
            message = (
                f"{call.name}() passes DistributedDataParallel by: gradients aren't averaged, and each rank "
                "trains a model of its own."
            )
            yield script.hit(call, message, f"Call {name}(...); let forward do what {call.method} does.")


def _within(script: Script, wrapped: set[str]) -> dict[str, tuple[str, ast.AST | None]]:
    """What names the model within DDP, the DDP's name, and the function in which it does, if in one alone.

    That is `model.module`, a name for that, or the name of what was wrapped.
    """
    found: dict[str, tuple[str, ast.AST | None]] = {f"{each}.module": (each, None) for each in wrapped}
    for name in script.bound_at:
        bound = script.bound(ast.Name(name, ast.Load()))
        if isinstance(bound, ast.Attribute) and (text := ast.unparse(bound)) in found:
            found[name] = found[text]
    for call in script.called(DDP):
        given, around = call.argument("module", 0), call.around[0] if call.around else None
        target = ast.unparse(around.targets[0]) if isinstance(around, ast.Assign) else ""
        if not target or not isinstance(given, ast.Name) or given.id == target:
            continue
        if not any(line > call.node.lineno for line in script.bound_at.get(given.id, ())):
            found[given.id] = (target, _scope(script, call))
    return found


def _without_gradients(call: Call) -> bool:
    withs = (item for node in call.around if isinstance(node, ast.With) for item in node.items)
    functions = (node for node in call.around if isinstance(node, ast.FunctionDef))
    decorators = (ast.unparse(each) for node in functions for each in node.decorator_list)
    texts = (*(ast.unparse(item.context_expr) for item in withs), *decorators)
    return any(_NO_GRADIENTS.search(text) for text in texts)


def _is_trained_on(script: Script, function: ast.AST, call: Call) -> bool:
    """Whether the backward pass of a function starts from what a call returns, over a few names."""
    losses = set(handed_back(script, function))
    held: set[str] = set()
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    for _ in range(_ROUNDS):
        for node in assigned:
            parts = list(ast.walk(node.value))
            names = {each.id for each in parts if isinstance(each, ast.Name)}
            if call.node in parts or names & held:
                held |= {each.id for target in node.targets for each in ast.walk(target)
                         if isinstance(each, ast.Name)}  # fmt: skip
    return bool(losses & held)


@rule("script.freeze-after-wrap", severity="error", raised_by="torch", evidence=_RAN)
def frozen_late(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Parameters frozen after DDP was made: it waits for their gradients."""
    for script in scripts(files):
        for made, name, inner in _wraps(script):
            if any(call.owner == name for call in script.methods("eval")) and not any(
                call.owner == name for call in script.methods("train")
            ):
                continue  # it is evaluated alone
            for node in ast.walk(_scope(script, made)):
                if not isinstance(node, ast.expr | ast.stmt) or node.lineno <= made.node.lineno:
                    continue
                value = _frozen(script, node, {name, *({inner} if inner else ())})
                if value is None or script.bound_at.get(name, [0])[-1] > node.lineno:
                    continue
                unfreezes = isinstance(value, ast.Constant) and value.value is True
                effect = (
                    "gradients are never averaged"
                    if unfreezes
                    else "it waits for their gradients: RuntimeError in the second step, Expected to have "
                    "finished reduction"
                )
                message = f"DistributedDataParallel in line {made.node.lineno} took stock before: {effect}."
                fix = "Do it before the model is wrapped."
                found = Hit(script.path, script.python.at(node), message, fix)
                yield replace(found, severity="wrong", raised_by="nobody") if unfreezes else found


def _wraps(script: Script) -> Iterator[tuple[Call, str, str]]:
    """Calls of DDP that takes parameters as they are, the name it is bound to, and the name that is wrapped."""
    for call in script.called(DDP):
        around = call.around[0] if call.around else None
        if call.unpacks or any(call.keyword(each) is not None for each in _FINDS):
            continue
        if isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Name):
            given = call.argument("module", 0)
            yield call, around.targets[0].id, given.id if isinstance(given, ast.Name) else ""


def _scope(script: Script, call: Call) -> ast.AST:
    return function_of(call) or script.python.tree


def _frozen(script: Script, node: ast.AST, names: set[str]) -> ast.expr | None:
    """What a statement sets requires_grad of a model to, outside of a loop over passes; None where it doesn't."""
    if (
        isinstance(node, ast.For)
        and _is_of(node.iter, names)
        and isinstance(node.target, ast.Name | ast.Tuple)
    ):
        inner = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        return next(filter(None, (_sets(each, inner) for each in node.body)), None)
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    call = node.value
    if (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "requires_grad_"
        and _is_of(call.func, names)
    ):
        return call.args[0] if call.args else ast.Constant(True)
    function = script.functions.get(ast.unparse(call.func))
    given = [at for at, each in enumerate(call.args) if _is_of(each, names)]
    if function is None or not given or given[0] >= len(function.args.args):
        return None
    parameter = {function.args.args[given[0]].arg}
    found = (_frozen(script, each, parameter) for each in function.body)
    return next(filter(None, found), None)


def _is_of(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression begins at one of these names: `model.module.parameters()`, `(model.a, model.b)`."""
    if isinstance(node, ast.Tuple | ast.List):
        return any(_is_of(each, names) for each in node.elts)
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute | ast.Call | ast.Subscript):
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return isinstance(inner, ast.Name) and inner.id in names


def _sets(node: ast.stmt, names: set[str]) -> ast.expr | None:
    """`p.requires_grad = ...` or `m.requires_grad_(...)`, in a loop within too."""
    if isinstance(node, ast.For) and _is_of(node.iter, names):
        inner = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        return next(filter(None, (_sets(each, inner) for each in node.body)), None)
    if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
        return node.value if target.attr == "requires_grad" and _is_of(target, names) else None
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        sets = isinstance(call.func, ast.Attribute) and call.func.attr == "requires_grad_"
        return (
            (call.args[0] if call.args else ast.Constant(True)) if sets and _is_of(call.func, names) else None
        )
    return None


_HAS_PARAMETERS = re.compile(
    r"(?:Linear|Conv\w+|Embedding|EmbeddingBag|LayerNorm|GroupNorm|BatchNorm\w*|LSTM|GRU|Transformer\w+"
    r"|MultiheadAttention|Parameter)\("
)
_FREEZES = re.compile(r"requires_grad_\(|requires_grad\s*=[^=]")
_LOOKS_THROUGH = re.compile(r"\bgetattr\(|children\(|\bmodules\(|__dict__|_modules|\bsetattr\(")


@rule("script.unused-part", severity="error", raised_by="torch", evidence=_RAN)
def unused_part(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A part of a model under DDP that nothing in the file calls: DDP waits for its gradients."""
    for script in scripts(files):
        wraps = list(_wraps(script)) if not _LOOKS_THROUGH.search(script.python.text) else []
        texts = {ast.unparse(_scope(script, made)) for made, _, _ in wraps}
        for node in script.nodes if wraps and not _FREEZES.search(script.python.text) else ():
            if not isinstance(node, ast.ClassDef) or not any(f"{node.name}(" in text for text in texts):
                continue
            if [script.name(base) for base in node.bases] != ["torch.nn.Module"]:
                continue
            for name, at in _parts(node):
                uses = len(re.findall(rf"\b{re.escape(name)}\b", script.python.text))
                if uses == 1:
                    message = (
                        f"nothing uses {name}, and DistributedDataParallel waits for its gradients: RuntimeError "
                        "in the second step, Expected to have finished reduction."
                    )
                    fix = "Take it out, freeze it before DDP, or give find_unused_parameters=True."
                    yield Hit(script.path, script.python.at(at), message, fix)


def _parts(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """`self.NAME = Linear(...)` in a class's own __init__."""
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
    init = next((each for each in functions if each.name == "__init__"), None)
    for each in ast.walk(init) if init is not None else ():
        if isinstance(each, ast.Assign) and isinstance(target := each.targets[0], ast.Attribute):
            own = isinstance(target.value, ast.Name) and target.value.id == "self"
            if own and _HAS_PARAMETERS.search(ast.unparse(each.value)):
                yield target.attr, each
