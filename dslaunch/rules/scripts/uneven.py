"""Training scripts in which a rank may leave the others in the middle of a step, by what it alone has seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.alone import JOINS, WHY, Alone, alone
from dslaunch.rules.scripts.guards import (
    COLLECTIVES,
    OF_ACCELERATE,
    SEES,
    function_of,
    guards,
    of_a_group,
    on_one_rank,
)
from dslaunch.rules.scripts.portions import SHARES
from dslaunch.rules.scripts.tree import DDP, FSDP, Call, Script, scripts
from dslaunch.rules.settings import Settings

_OF_ENGINES = frozenset({"backward", "eval_batch", "save_checkpoint", "step", "train_batch"})
_CAUGHT = re.compile(
    r"|.*(?:Exception|RuntimeError|OutOfMemoryError|OOM|ValueError|OSError|IOError|IndexError).*"
)
"""Exceptions that one rank may have; none is named where all are caught."""
_ENDS = ("sys.exit", "os._exit", "exit", "quit", "os.abort")


@rule(
    "script.uneven-pass", severity="hang", raised_by="nobody",
    evidence="torch 2.13, run on two ranks; PyTorch 2.13 documentation: DistributedDataParallel",
)  # fmt: skip
def uneven(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A pass, step or collective that a rank leaves out by its own loss, samples, clock, signal or exception."""
    for script in scripts(files):
        if not _on_ranks(script) or JOINS.search(script.python.text):
            continue
        told: set[Position] = set()
        beside = tuple(other for other in scripts(files) if other is not script)
        calls = {call.node: call for call in (*script.passes, *script.calls)}
        trains = _trains(script)
        for call in calls.values():
            if not _meets(script, call) and not (call.owner in ("", "self") and call.method in trains):
                continue
            if (found := _left_out(script, call, beside)) is None or found[0] in told:
                continue
            at, why = found
            told.add(at)
            message = (
                f"{why}: a rank that leaves {call.method} out in line {call.node.lineno} lets the others "
                "wait for ever, or meets them one step later with other gradients."
            )
            yield Hit(script.path, at, message, _FIX)
        yield from _uneven_steps(script, told, beside)


def _trains(script: Script) -> set[str]:
    """The functions of the file in which all ranks meet in a backward pass."""
    functions = (call.function for call in script.passes if _meets(script, call))
    return {each.name for each in functions if each is not None}


_FIX = "Let all decide alike: all_reduce the flag first, or stop the job."


def _on_ranks(script: Script) -> bool:
    """Whether the passes of a script are its own, and those of several ranks."""
    if script.accelerators:
        return True
    by_engine = any(_is_engines(call) for call in script.passes)
    return not script.by_framework and bool(script.called(DDP, FSDP) or script.deepspeed or by_engine)


def _is_engines(call: Call) -> bool:
    """Whether it is the pass of an engine that another file makes: `model_engine.backward(loss)`."""
    return bool(call.node.args) and call.owner.rpartition(".")[2].endswith("engine")


def _meets(script: Script, call: Call) -> bool:
    """Whether all ranks meet in a call."""
    if any(isinstance(node, ast.With) and "no_sync" in ast.unparse(node.items[0]) for node in call.around):
        return False
    if call.owner in script.engines and call.method in _OF_ENGINES:
        return True
    if call.owner in script.accelerators:
        return call.method in OF_ACCELERATE or call.method == "backward"
    if call.method == "backward":
        return call.owner.endswith("loss") or not call.owner or _is_engines(call)
    collective = call.owner == "torch.distributed" and call.method in COLLECTIVES
    return collective and not of_a_group(call)


def _left_out(script: Script, call: Call, beside: tuple[Script, ...]) -> tuple[Position, str] | None:
    """What makes one rank pass a call by, and in words; None where nothing is seen to."""
    for test in _passed_by(script, call):
        if (kind := _alone(script, call, beside).kind(test)) is not None:
            return script.python.at(test), f"`{ast.unparse(test)}` {WHY[kind]}"
    for loop in (each for each in call.around if isinstance(each, ast.For | ast.While)):
        if (ends := _ends_on_one_rank(loop.body, None)) is not None:
            return script.python.at(ends), f"`{ast.unparse(ends)}` ends the loop on some ranks alone"
    for node, first_branch in guards(call):
        if first_branch and SEES.search(ast.unparse(node.test)) and _first_makes(node, call):
            why = f"`{ast.unparse(node.test)}` turns over as soon as the first rank has made it"
            return script.python.at(node.test), why
    if call.method == "backward":
        for each in call.around:
            if isinstance(each, ast.For | ast.While):
                return _excepted(each, call)
            if isinstance(each, ast.Try) and (handler := _goes_on(each)) is not None:
                return _at(handler), _EXCEPTED
    return None


def _ends_on_one_rank(body: list[ast.stmt], told: ast.expr | None) -> ast.expr | None:
    """The condition about a rank under which a loop is left by `break`."""
    for node in body:
        if isinstance(node, ast.Break) and told is not None:
            return told
        if isinstance(node, ast.If):
            joined = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
            parts = node.test.values if isinstance(node.test, ast.BoolOp) and joined else [node.test]
            ours = next((node.test for each in parts if on_one_rank(each) is not None), told)
            found = _ends_on_one_rank(node.body, ours) or _ends_on_one_rank(node.orelse, told)
            if found is not None:
                return found
        elif isinstance(node, ast.With) and (found := _ends_on_one_rank(node.body, told)) is not None:
            return found
    return None


def _first_makes(node: ast.If, call: Call) -> bool:
    """Whether the first rank does something alone in a branch, above the call."""
    above = (each for each in node.body if each.lineno < call.node.lineno)
    return any(isinstance(each, ast.If) and on_one_rank(each.test) is True for each in above)


_EXCEPTED = "one rank may have this exception, and go on, while the others don't"


def _excepted(loop: ast.For | ast.While, call: Call) -> tuple[Position, str] | None:
    """A part of the pass above the call that an exception ends."""
    for node in loop.body:
        if isinstance(node, ast.Try) and (node.end_lineno or 0) < call.node.lineno:
            handler = _goes_on(node)
            if handler is not None and any(isinstance(each, ast.Continue) for each in ast.walk(handler)):
                return _at(handler), _EXCEPTED
    return None


def _at(handler: ast.ExceptHandler) -> Position:
    return Position(handler.lineno, handler.col_offset + 1)


def _alone(script: Script, call: Call, beside: tuple[Script, ...]) -> Alone:
    return alone(script, call.function or script.python.tree, beside)


def _passed_by(script: Script, call: Call) -> Iterator[ast.expr]:
    """The conditions within a function by which a call is left out: around it, above it, or of its loops."""
    for node, first_branch in guards(call):
        if not _holds(node.orelse if first_branch else node.body, call.method):
            yield node.test
    innermost = True
    for each in call.around:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        if isinstance(each, ast.While):
            yield each.test
        if isinstance(each, ast.For | ast.While):
            yield from _leaving(each.body, call, goes_on=innermost)
            innermost = False
    function = function_of(call)
    above = [node for node in function.body if node.lineno < call.node.lineno] if (
        isinstance(function, ast.FunctionDef)
    ) else []  # fmt: skip
    yield from (test for node in above for test in _leaving([node], call, goes_on=False))


def _leaving(body: list[ast.stmt], call: Call, *, goes_on: bool) -> Iterator[ast.expr]:
    """The conditions of statements that end the loop or function, or go on with the next pass."""
    for node in body:
        if not isinstance(node, ast.If):
            continue
        if not any(each is call.node for each in ast.walk(node)):
            for inner in (node.body, node.orelse):
                yield from _leaving(inner, call, goes_on=goes_on)
        if _holds(node.body, call.method):
            continue
        above = (node.end_lineno or 0) < call.node.lineno
        last = node.body[-1]
        if isinstance(last, ast.Break | ast.Return) or (goes_on and above and isinstance(last, ast.Continue)):
            yield node.test


def _holds(body: list[ast.stmt], method: str) -> bool:
    """Whether the same is called in another branch."""
    nodes = (each for node in body for each in ast.walk(node))
    return any(isinstance(each, ast.Attribute) and each.attr == method for each in nodes)


def _goes_on(node: ast.Try) -> ast.ExceptHandler | None:
    """The handler that takes an exception of this rank's own and goes on with the next pass."""
    for handler in node.handlers:
        kind = ast.unparse(handler.type) if handler.type is not None else ""
        parts = [each for part in handler.body for each in ast.walk(part)]
        calls = [ast.unparse(each.func) for each in parts if isinstance(each, ast.Call)]
        if not _CAUGHT.fullmatch(kind) or any(SHARES.search(name) for name in calls):
            continue
        ends = any(isinstance(each, ast.Raise | ast.Break | ast.Return) for each in parts)
        if any(isinstance(each, ast.Continue) for each in parts) or not (ends or set(calls) & set(_ENDS)):
            return handler
    return None


def _uneven_steps(
    script: Script, told: set[Position], beside: tuple[Script, ...]
) -> Iterator[Hit]:
    """An optimizer's own step that a rank leaves out: nothing waits, and the weights differ from then on."""
    optimizers = {name for each in script.calls if each.name.startswith("torch.optim.")
                  for name in script.assigned(each.name)}  # fmt: skip
    for call in script.methods("step") if script.called(DDP, FSDP) else ():
        given = ast.unparse(call.node.args[0]) if call.node.args else ""
        if call.owner not in optimizers and given not in optimizers:
            continue
        for test in _passed_by(script, call):
            kind, at = _alone(script, call, beside).kind(test), script.python.at(test)
            if kind in ("loss", "data", "chance", "memory") and at not in told:
                told.add(at)
                message = (
                    f"`{ast.unparse(test)}` {WHY[kind]}: a rank that leaves {call.owner}.step out in line "
                    f"{call.node.lineno} has other weights than the rest from then on, and nothing says so."
                )
                yield replace(Hit(script.path, at, message, _FIX), severity="wrong")
                break
