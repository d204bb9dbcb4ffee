"""Training scripts that go past DistributedDataParallel, or change what it was built around."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
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
        flows: dict[ast.AST, _Flow] = {}
        for call in script.calls if wrapped else ():
            named = [each for each in within if f"{call.name}.".startswith(f"{each}.")]
            function = function_of(call) or script.python.tree
            name, where = within[named[0]] if named else ("", None)
            if where is not None and where is not function:
                continue
            if not name or without_gradients(call):
                continue
            flow = flows.setdefault(function, _Flow(script, function))
            if name in flow.called or not flow.is_trained_on(call):
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
            found[given.id] = (target, scope(script, call))
    return found


def without_gradients(call: Call) -> bool:
    withs = (item for node in call.around if isinstance(node, ast.With) for item in node.items)
    functions = (node for node in call.around if isinstance(node, ast.FunctionDef))
    decorators = (ast.unparse(each) for node in functions for each in node.decorator_list)
    texts = (*(ast.unparse(item.context_expr) for item in withs), *decorators)
    return any(_NO_GRADIENTS.search(text) for text in texts)


@dataclass(frozen=True)
class _Flow:
    """What leads to the backward passes of a function; gathered once, many calls are asked about."""

    script: Script
    function: ast.AST

    @cached_property
    def called(self) -> set[str]:
        """What is called, as it is written."""
        return {ast.unparse(each.func) for each in ast.walk(self.function) if isinstance(each, ast.Call)}

    @cached_property
    def _losses(self) -> set[str]:
        return set(handed_back(self.script, self.function))

    @cached_property
    def _assigned(self) -> list[tuple[set[ast.AST], set[str], set[str]]]:
        """Of each assignment what stands in its value, the names there, and those that it binds."""
        found = (node for node in ast.walk(self.function) if isinstance(node, ast.Assign))
        return [(set(ast.walk(node.value)), _names([node.value]), _names(node.targets)) for node in found]

    def is_trained_on(self, call: Call) -> bool:
        """Whether a backward pass starts from what a call returns, over a few names."""
        held: set[str] = set()
        for _ in range(_ROUNDS if self._losses else 0):
            for parts, names, bound in self._assigned:
                if call.node in parts or names & held:
                    held |= bound
        return bool(self._losses & held)


def _names(nodes: list[ast.expr]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


@rule("script.freeze-after-wrap", severity="error", raised_by="torch", evidence=_RAN)
def frozen_late(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Parameters frozen after DDP was made: it waits for their gradients."""
    for script in scripts(files):
        for made, name, inner in wraps(script):
            if any(call.owner == name for call in script.methods("eval")) and not any(
                call.owner == name for call in script.methods("train")
            ):
                continue  # it is evaluated alone
            for node in ast.walk(scope(script, made)):
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


@rule(
    "script.freeze-after-engine", severity="wrong", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py 0.19.8, run at stages 0 to 3",
)  # fmt: skip
def frozen_under_engine(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Parameters frozen after deepspeed.initialize: its optimizer holds them, and decays them in each step."""
    config = one_config(plan, files, settings)
    decay = config.get("optimizer.params.weight_decay") if config is not None else None
    for script in scripts(files) if isinstance(decay, int | float) and decay > 0 else ():
        for made in script.deepspeed:
            target = made.around[0] if made.around else None
            given = made.argument("model", 1)
            if not isinstance(target, ast.Assign) or not isinstance(given, ast.Name):
                continue
            first = target.targets[0].elts[0] if isinstance(target.targets[0], ast.Tuple) else None
            names = {given.id, ast.unparse(first)} if first is not None else {given.id}
            for node in ast.walk(scope(script, made)):
                if not isinstance(node, ast.expr | ast.stmt) or node.lineno <= made.node.lineno:
                    continue
                value = _frozen(script, node, names)
                if isinstance(value, ast.Constant) and value.value is False:
                    message = (
                        f"deepspeed.initialize in line {made.node.lineno} has put what is frozen here into its "
                        f"optimizer: weight_decay {decay:g} shrinks it in each step."
                    )
                    fix = "Freeze before deepspeed.initialize, and give it those that train as model_parameters."
                    yield Hit(script.path, script.python.at(node), message, fix)


def wraps(script: Script) -> Iterator[tuple[Call, str, str]]:
    """Calls of DDP that takes parameters as they are, the name it is bound to, and the name that is wrapped."""
    for call in script.called(DDP):
        around = call.around[0] if call.around else None
        if call.unpacks or any(call.keyword(each) is not None for each in _FINDS):
            continue
        if isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Name):
            given = call.argument("module", 0)
            yield call, around.targets[0].id, given.id if isinstance(given, ast.Name) else ""


def scope(script: Script, call: Call) -> ast.AST:
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
        if isinstance(inner, ast.Attribute) and inner.attr == "grad":
            return False  # of a gradient, and not of a parameter
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return isinstance(inner, ast.Name) and inner.id in names


def _sets(node: ast.stmt, names: set[str]) -> ast.expr | None:
    """`p.requires_grad = ...` or `m.requires_grad_(...)`, in a loop or a condition within too."""
    if isinstance(node, ast.If):
        return next(filter(None, (_sets(each, names) for each in (*node.body, *node.orelse))), None)
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


_BY_HAND = re.compile(r"\.grad\b|average_\w*grad|reduce_\w*grad")
"""What averages them without DDP."""


@rule("script.no-sync-always", severity="wrong", raised_by="nobody", evidence=_RAN)
def always(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Every backward pass under no_sync of DDP, that of the last micro-batch too: gradients are never averaged."""
    for script in scripts(files):
        wrapped = script.assigned(DDP)
        if not wrapped or not script.passes or _BY_HAND.search(script.python.text):
            continue
        withs = [_no_sync(script, call, wrapped) for call in script.passes]
        if all(each is not None for each in withs):
            for at in dict.fromkeys(each for each in withs if each is not None):
                message = (
                    f"every backward pass stands under {ast.unparse(at)}, the last one before a step too: "
                    "gradients are never averaged, and each rank trains a model of its own."
                )
                fix = "Leave it out for the last micro-batch of a step: contextlib.nullcontext() there."
                yield Hit(script.path, script.python.at(at), message, fix)


def _no_sync(script: Script, call: Call, wrapped: set[str]) -> ast.Call | None:
    """The `model.no_sync()` that a pass always stands under."""
    for node in call.around:
        if isinstance(node, ast.FunctionDef):
            return None
        for item in node.items if isinstance(node, ast.With) else ():
            made = item.context_expr
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr == "no_sync":
                return made if ast.unparse(made.func.value) in wrapped else None
    return None
