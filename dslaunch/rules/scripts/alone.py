"""What a rank alone sees in its training loop: its losses and samples, its clock, signals, chance, its memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dslaunch.rules.scripts.objects import Depends, class_of, parameters
from dslaunch.rules.scripts.portions import (
    SHARES,
    computes_loss,
    is_of_share,
    is_shared_out,
    looped,
    method,
    within,
)
from dslaunch.rules.scripts.tree import Script

Kind = Literal["loss", "data", "clock", "signal", "chance", "memory"]
WHY: Mapping[Kind, str] = {
    "loss": "differs from rank to rank",
    "data": "is about this rank's own samples",
    "clock": "goes by each rank's own clock",
    "signal": "holds once the signal has reached this rank, which isn't in the same step on all",
    "chance": "is drawn by each rank for itself",
    "memory": "is about this rank's own memory",
}
"""What a condition on it is called in a finding."""
_MAKES = re.compile(
    r"(?:\w*criterion|loss_fn|loss_func|loss_function|\w*cross_entropy|mse_loss|nll_loss|l1_loss"
    r"|\w*model|\w*engine|net|ddp|compute_loss)"
)
"""What a call is named that gives the loss of this rank's own samples."""
_KEEPS = frozenset({
    "abs", "all", "any", "bool", "cpu", "cuda", "detach", "float", "int", "isfinite", "isinf", "isnan", "item",
    "len", "max", "mean", "min", "numel", "round", "size", "sum", "tensor", "to", "total_seconds",
})  # fmt: skip
"""What a call is named whose result is this rank's own where what it is given is."""
_CALLED: Mapping[Kind, re.Pattern[str]] = {
    "clock": re.compile(r"time\.(?:time|monotonic|perf_counter)|datetime\.(?:datetime\.)?(?:now|utcnow)"),
    "chance": re.compile(r"random\.(?:random|uniform)|numpy\.random\.(?:rand|random|uniform)|torch\.rand"),
    "memory": re.compile(r"torch\.cuda\.(?:max_)?(?:memory_(?:allocated|reserved)|mem_get_info)"),
}
"""Functions whose results differ from rank to rank."""
_EMPTY = re.compile(r"(?:len\(.+\)|.+\.(?:numel|sum|size)\(.*\)|.+\.shape\[0\]) (?:==|!=|>|<=) 0|.+ < 1")
"""Questions whether there is anything in a batch; its size is the same on all ranks by DistributedSampler."""
JOINS = re.compile(r"\bJoin\(|with \w+\.join\(")
"""torch's Join, in which a rank that is through takes part in the others' collectives."""
_RANK = re.compile(r"(?i)rank|process_index")


def alone(script: Script, function: ast.AST, beside: tuple[Script, ...]) -> Alone:
    """One for each function, kept with the script: many conditions are asked about."""
    kept = vars(script).setdefault("alone", {})
    if function not in kept:
        kept[function] = Alone(script, function, beside)
    found = kept[function]
    assert isinstance(found, Alone)
    return found


@dataclass(frozen=True)
class Alone:
    """One function, or the file around its functions, as each rank runs it."""

    script: Script
    function: ast.AST
    beside: tuple[Script, ...]
    """The other files, whose classes it may use."""

    @cached_property
    def _nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.function))

    def kind(self, test: ast.expr) -> Kind | None:
        """By what a condition differs from rank to rank; None where nothing is seen that does."""
        return self._judged(test, self._flags)

    def _judged(self, test: ast.expr, flags: Mapping[str, Kind]) -> Kind | None:
        if SHARES.search(ast.unparse(test)):
            return None
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        return next(filter(None, (self._part(part, flags) for part in parts)), None)

    def _part(self, test: ast.expr, flags: Mapping[str, Kind]) -> Kind | None:
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        if _text(test) in self._signals:
            return "signal"
        if isinstance(test, ast.Name) and test.id in flags:
            return flags[test.id]
        if found := self._by_object(test):
            return found
        found = self._of(test, self._own)
        if found == "data":
            return found if self._asks_for_samples(test) else None
        compares = isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.Is | ast.IsNot)
        asks = compares or re.search(r"\bis(?:nan|inf|finite)\(", ast.unparse(test)) is not None
        return found if asks else None

    def _asks_for_samples(self, test: ast.expr) -> bool:
        """`batch is None`, `not batch`, `len(batch) == 0`, or whether its values are numbers."""
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
            test = test.left
        text = ast.unparse(test)
        return text in self._batches or bool(_EMPTY.fullmatch(text) or re.search(r"\bis(?:nan|inf)\(", text))

    def _of(self, value: ast.expr, own: Mapping[str, Kind]) -> Kind | None:
        """What an expression holds of this rank's own; None where a call may make something else of it."""
        nodes = list(ast.walk(value))
        if any(isinstance(node, ast.Dict) for node in nodes):
            return None  # which entry is asked for isn't followed
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for node in calls:
            for kind, pattern in _CALLED.items():
                if pattern.fullmatch(self.script.name(node.func)):
                    return kind if kind != "chance" or self._is_unseeded else None
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if not all(method(node) in _KEEPS for node in calls):
            return None
        return next((own[name] for name in sorted(names) if name in own), None)

    @cached_property
    def _shared(self) -> set[str]:
        """Names that go into, or come out of, what makes one value of all ranks'."""
        found: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.Call) and SHARES.search(ast.unparse(node.func)):
                found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Assign) and SHARES.search(ast.unparse(node.value)):
                found |= {each.id for target in node.targets for each in ast.walk(target)
                          if isinstance(each, ast.Name)}  # fmt: skip
        for name, value in self._assigned:
            if self._is_one_of(value, found):
                found.add(name)
        return found

    @cached_property
    def _own(self) -> dict[str, Kind]:
        """Names of what this rank alone has, and that is never put together with the others'."""
        found: dict[str, Kind] = dict.fromkeys(self._batches - self._shared, "data")
        found |= dict.fromkeys(set(handed_back(self.script, self.function)) - self._shared, "loss")
        for name, value in self._assigned:
            if name not in self._shared and name not in found:
                made = (name.endswith("loss") and _of_one_rank(self.script, value)) or is_of_share(
                    self.script, value
                )
                if kind := "loss" if made else self._of(value, found):
                    found[name] = kind
        found |= dict.fromkeys(self._gathered(found) - self._shared, "loss")
        return found | dict.fromkeys(self._counted(found) - self._shared, "loss")

    def _gathered(self, own: Mapping[str, Kind]) -> set[str]:
        """Names in which losses of this rank's passes, or over its share of the data, are added up or listed."""
        losses = {name for name, kind in own.items() if kind == "loss"}
        found = {
            each.id for node in self._nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Call) and is_of_share(self.script, node.value)
            for each in node.targets[0].elts if isinstance(each, ast.Name)
        }  # fmt: skip
        for loop in self._nodes:
            if isinstance(loop, ast.For) and (parts := list(within(loop))) and self._has_share(loop, parts):
                found |= {name for name, value in _added(parts) if self._is_one_of(value, losses)
                          or computes_loss(value)}  # fmt: skip
        for name, value in self._assigned:
            if name not in own and self._is_one_of(value, found):
                found.add(name)
        return found

    def _has_share(self, loop: ast.For, parts: list[ast.AST]) -> bool:
        """Whether a loop trains, or goes through what is shared out."""
        trains = any(isinstance(each, ast.Attribute) and each.attr == "backward" for each in parts)
        return trains or is_shared_out(self.script, ast.unparse(looped(loop)))

    def _is_one_of(self, value: ast.expr, names: set[str]) -> bool:
        return self._of(value, dict.fromkeys(names, "loss")) == "loss"

    def _by_object(self, test: ast.expr) -> Kind | None:
        """By what an object decides that was given this rank's own: `stopper(val_loss)`, `monitor.should_stop`."""
        for node in [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]:
            asked = node.func if isinstance(node, ast.Call) else node
            if isinstance(asked, ast.Attribute):
                found = self._decided(asked.value, asked.attr)
            else:
                found = self._decided(asked, "__call__") if isinstance(node, ast.Call) else None
            if found:
                return found
        return None

    def _decided(self, owner: ast.expr, name: str) -> Kind | None:
        """The kind of what an object was given, where this attribute or method of it depends on that."""
        fed = self._fed.get(ast.unparse(owner), [])
        made = class_of(self.script, owner, self.beside) if fed else None
        if made is None or SHARES.search(ast.unparse(made)):
            return None
        for by, call in fed:
            for parameter, value in parameters(made, by, call):
                if kind := self._of(value, self._own):
                    depends = Depends(made, by, frozenset({parameter}))
                    if name in depends.attributes | depends.methods:
                        return kind
        return None

    @cached_property
    def _fed(self) -> dict[str, list[tuple[str, ast.Call]]]:
        """The calls of each object, as it is written, in the function: which method, and the call."""
        found: dict[str, list[tuple[str, ast.Call]]] = {}
        for node in self._nodes:
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                found.setdefault(called, []).append(("__call__", node))
                owner, _, by = called.rpartition(".")
                found.setdefault(owner, []).append((by, node))
        return found

    def _counted(self, own: Mapping[str, Kind]) -> set[str]:
        """Names that are counted up or set where a rank's own loss decides: `bad += 1`, `stop = True`."""
        found: set[str] = set()
        for node in self._nodes:
            if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
                continue
            names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
            if any(own.get(name) == "loss" for name in names) and not SHARES.search(ast.unparse(node.test)):
                for part in (*node.body, *node.orelse):
                    if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                        found.add(part.target.id)
                    elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                        found |= {part.targets[0].id} if isinstance(part.value, ast.Constant) else set()
        return found

    @cached_property
    def _flags(self) -> dict[str, Kind]:
        """Names bound once to a condition that differs from rank to rank."""
        own = (
            (name, self._judged(value, {})) for name, value in self._assigned
            if name not in self._shared and self._is_bound_once(name)
        )  # fmt: skip
        return {name: kind for name, kind in own if kind}

    def _is_bound_once(self, name: str) -> bool:
        """But for a first `stop = False`."""
        first = sum(other == name and isinstance(each, ast.Constant) for other, each in self._assigned)
        return len(self.script.bound_at.get(name, ())) - first == 1

    @cached_property
    def _assigned(self) -> list[tuple[str, ast.expr]]:
        """`NAME = value`, in the order of the lines."""
        nodes = (node for node in self._nodes if isinstance(node, ast.Assign))
        named = [
            (target.lineno, target.id, node.value)
            for node in nodes if isinstance(target := node.targets[0], ast.Name)
        ]  # fmt: skip
        return [(name, value) for _, name, value in sorted(named, key=lambda each: each[0])]

    @cached_property
    def _batches(self) -> set[str]:
        """What loops over a loader bind."""
        found: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.For) and re.search(r"loader\b", ast.unparse(node.iter)):
                counted = isinstance(node.iter, ast.Call) and method(node.iter) == "enumerate"
                pair = isinstance(node.target, ast.Tuple) and counted
                target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) and pair else node.target
                found |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        return found

    @cached_property
    def _signals(self) -> set[str]:
        """What a handler of signals sets: `stop`, `.stop` of any object, `event.is_set()`, `flags['stop']`."""
        found: set[str] = set()
        for call in self.script.called("signal.signal"):
            given = call.argument("handler", 1)
            name = (
                ast.unparse(given).rpartition(".")[2] if isinstance(given, ast.Name | ast.Attribute) else ""
            )
            handler = given if isinstance(given, ast.Lambda) else self.script.functions.get(name)
            for node in ast.walk(handler) if handler is not None else ():
                if isinstance(node, ast.Assign):
                    found |= {_text(each) for each in node.targets}
                elif isinstance(node, ast.Call) and (text := ast.unparse(node.func)).endswith(".set"):
                    found.add(f"{text.removesuffix('.set')}.is_set()")
        return found

    @cached_property
    def _is_unseeded(self) -> bool:
        """Whether nothing here sets a seed, or one that holds the rank."""
        seeds = [ast.unparse(call.node) for call in self.script.calls if "seed" in call.name]
        return (not seeds and "seed" not in self.script.python.text) or any(map(_RANK.search, seeds))


def _added(parts: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """What is added to a name, or to a list of that name."""
    for node in parts:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        listed = isinstance(node, ast.Call) and method(node) == "append" and bool(node.args)
        if listed and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.args[0]


def _text(node: ast.expr) -> str:
    """An attribute by its own name alone, whatever holds it."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def handed_back(script: Script, function: ast.AST) -> Iterator[str]:
    """The names that backward passes of a function start from: each rank's own loss."""
    nodes = {id(node) for node in ast.walk(function)}
    for call in script.passes:
        if id(call.node) in nodes:
            given = call.node.args[0] if call.node.args else None
            inner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
            if given is None and isinstance(inner, ast.Call) and method(inner) == "scale" and inner.args:
                given = inner.args[0]
            for each in (given, inner if given is None else None):
                if isinstance(each, ast.Name):
                    yield each.id


def _of_one_rank(script: Script, value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr == "loss"
    if not isinstance(value, ast.Call):
        return False
    name = script.name(value.func).rpartition(".")[2]
    inner = value.func.value if isinstance(value.func, ast.Attribute) else value.func
    return bool(_MAKES.fullmatch(name)) or (name == "mean" and _of_one_rank(script, inner))
