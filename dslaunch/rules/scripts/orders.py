"""Samples that each rank puts in an order of its own, and of which it then takes its share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.seeds import Draw, draw_of, why_unlike
from dslaunch.rules.scripts.tree import LOADER, Call, Script, scripts
from dslaunch.rules.settings import Settings

_ROUNDS = 2
"""Functions and classes of the file that use one another are followed so far."""
_RANK = re.compile(r"\b(?:global_)?rank\b|get_rank\(\)|process_index|\bRANK\b")
_ORDERLESS = frozenset({"Counter", "len", "max", "min", "set", "sorted", "sum", "unique"})
"""What a call is named whose result is the same in any order."""
_OF_TRAINERS = re.compile(r"(?:transformers|trl)\.(?:\w+\.)*\w*Trainer")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PARTS = (ast.Name, ast.Attribute)


@rule("script.order-seed", severity="wrong", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def order_seed(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Samples that each rank shuffles or splits under a seed of its own, before it takes its share of them."""
    every = list(scripts(files))
    for script in every:
        draws = {call.node: found for call in script.every if (found := draw_of(script, call)) is not None}
        flow = Flow(script, draws, _by_trainer(files, script, settings)) if draws else None
        for draw, sink, what in flow.shared() if flow is not None else ():
            if any("__name__" not in ast.unparse(node.test) for node, _ in guards(draw.call)):
                continue
            if why := why_unlike(script, draw.call, draw.library, every):
                message = (
                    f"{why}: each rank draws another order here, and {what} in line {sink.lineno} gives it "
                    "its share of that: some samples come several times in an epoch, others never."
                )
                yield script.hit(draw.call, message, draw.fix)


def _by_trainer(files: FileSet, script: Script, settings: Settings) -> bool:
    """Whether the file's Trainer runs on several ranks: a command says so, or a DeepSpeed configuration."""
    several = (settings.world_size or 0) > 1 and any(each is script for _, _, each in launched(files))
    return several or any(call.keyword("deepspeed") is not None for call in script.methods("TrainingArguments"))


@dataclass
class Flow:
    """How drawn orders go through a file, line by line."""

    script: Script
    draws: dict[ast.Call, Draw]
    by_trainer: bool
    returned: dict[str, Draw] = field(default_factory=dict)
    """Functions of the file that return what is drawn, and classes that hold it as their samples."""
    found: dict[ast.Call, tuple[Draw, ast.expr, str]] = field(default_factory=dict)

    def shared(self) -> Iterator[tuple[Draw, ast.expr, str]]:
        """Each draw whose samples are shared out, with where, and by what."""
        self.calls = {call.node: call for call in self.script.every}
        functions = [node for node in self.script.nodes if isinstance(node, _Function)]
        classes = [node for node in self.script.nodes if isinstance(node, ast.ClassDef)]
        for _ in range(_ROUNDS):
            outer: dict[str, Draw] = {}
            self._follow(self.script.python.tree.body, outer)
            for function in functions:
                held = dict(outer)
                if (drawn := self._follow(function.body, held)) is not None:
                    self.returned.setdefault(function.name, drawn)
            for each in classes:
                if (drawn := self._samples(each, outer)) is not None:
                    self.returned.setdefault(each.name, drawn)
        yield from self.found.values()

    def _samples(self, node: ast.ClassDef, outer: dict[str, Draw]) -> Draw | None:
        """The draw that orders what a data set gives out by its place."""
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        init, get = methods.get("__init__"), methods.get("__getitem__")
        if init is None or get is None:
            return None
        held = dict(outer)
        self._follow(init.body, held)
        read = [f"{self._text(each.value)}." for each in ast.walk(get) if isinstance(each, ast.Subscript)]
        own = ((name, drawn) for name, drawn in held.items() if name.startswith("self."))
        return next((drawn for name, drawn in own if any(each.startswith(f"{name}.") for each in read)), None)

    def _follow(self, body: list[ast.stmt], held: dict[str, Draw]) -> Draw | None:
        """Goes through statements; what they return of what is drawn."""
        returned: Draw | None = None
        for node in body:
            if isinstance(node, _Function | ast.ClassDef):
                continue
            own = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            own += [each.context_expr for each in node.items] if isinstance(node, ast.With) else []
            for each in own:
                self._look(each, held)
            if isinstance(node, ast.Return) and node.value is not None:
                returned = returned or self._drawn(node.value, held)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._bind(node.targets if isinstance(node, ast.Assign) else [node.target], node.value, held)
            for inner in ("body", "orelse", "finalbody"):
                found = self._follow(getattr(node, inner, []), held)
                returned = returned or found
        return returned

    def _bind(self, targets: list[ast.expr], value: ast.expr, held: dict[str, Draw]) -> None:
        drawn = self._drawn(value, held)
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if text := self._text(each):
                    held.pop(text, None)
                    if drawn is not None:
                        held[text] = drawn

    def _look(self, node: ast.expr, held: dict[str, Draw]) -> None:
        """Finds what an expression shuffles in its place, and what it shares out."""
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and (call := self.calls.get(each)) is not None:
                self._shared_by(call, held)
                drawn = self.draws.get(each)
                if drawn is not None and drawn.target is not None and (text := self._text(drawn.target)):
                    held[text] = drawn
                elif call.method == "sort":
                    held.pop(call.owner, None)
            elif isinstance(each, ast.Subscript) and _is_of_rank(each):
                self._record(each.value, held, each, "the slice by ranks")
            elif isinstance(each, ast.comprehension) and _is_turn(each):
                self._record(each.iter, held, each.iter, "the choice by ranks")

    def _shared_by(self, call: Call, held: dict[str, Draw]) -> None:
        name = call.name
        if name == "torch.utils.data.DistributedSampler":
            self._record(call.argument("dataset", 0), held, call.node, "DistributedSampler")
        elif name == "deepspeed.initialize":
            self._record(call.argument("training_data", 4), held, call.node, "deepspeed.initialize")
        elif name == LOADER and self.script.accelerators and "streaming=True" not in self.script.python.text:
            self._record(call.argument("dataset", 0), held, call.node, "accelerate's loader")
        elif name.endswith("split_dataset_by_node"):
            self._record(call.argument("dataset", 0), held, call.node, "split_dataset_by_node")
        elif self.by_trainer and _OF_TRAINERS.fullmatch(name) and "streaming=True" not in self.script.python.text:
            self._record(call.argument("train_dataset", 3), held, call.node, "the Trainer")

    def _record(self, node: ast.expr | None, held: dict[str, Draw], at: ast.expr, what: str) -> None:
        drawn = self._drawn(node, held) if node is not None else None
        if drawn is not None:
            self.found.setdefault(drawn.call.node, (drawn, at, what))

    def _drawn(self, node: ast.AST, held: dict[str, Draw]) -> Draw | None:
        """The draw that an expression's order goes by; None where none is seen."""
        if isinstance(node, ast.Call):
            found = self.draws.get(node)
            if found is not None and found.target is None:
                return found
            name = self.script.name(node.func)
            if name.rpartition(".")[2] in _ORDERLESS:
                return None
            if name in self.returned:
                return self.returned[name]
        if isinstance(node, ast.Name | ast.Attribute) and (text := self._text(node)) in held:
            return held[text]
        return next((found for each in ast.iter_child_nodes(node) if (found := self._drawn(each, held))), None)

    def _text(self, node: ast.expr) -> str:
        """A name, or an attribute of names."""
        return ast.unparse(node) if isinstance(node, _PARTS) and self.script.name(node) else ""


def _is_of_rank(node: ast.Subscript) -> bool:
    """`files[rank::world]`, or `files[rank * size : (rank + 1) * size]`."""
    begins = node.slice.lower if isinstance(node.slice, ast.Slice) else None
    return begins is not None and bool(_RANK.search(ast.unparse(begins)))


def _is_turn(node: ast.comprehension) -> bool:
    """`for i, file in enumerate(files) if i % world == rank`."""
    tests = [ast.unparse(each) for each in node.ifs]
    return any("%" in each and "==" in each and _RANK.search(each) for each in tests)
