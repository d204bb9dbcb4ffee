"""A training script's syntax tree as rules ask for it: calls by their full names, conditions, frameworks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dslaunch.files.fileset import FileSet
from dslaunch.files.python import PythonScript
from dslaunch.rules.registry import Hit

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
FULLY_SHARD = ("torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard")
"""FSDP 2, by both of its names."""
INIT = "torch.distributed.init_process_group"
LOADER = "torch.utils.data.DataLoader"
SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.utils.data.distributed.DistributedSampler": "torch.utils.data.DistributedSampler",
}
_TRAINERS = re.compile(r"(?:\w*Trainer|Accelerator|Fabric|LightningModule)")


@dataclass(frozen=True)
class Call:
    """One call, with what stands around it, from the inside out."""

    node: ast.Call
    name: str
    """The full name through the file's imports: `torch.distributed.barrier`; `loss.backward` for a method."""
    around: tuple[ast.AST, ...]

    @property
    def method(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """What stands before the last dot."""
        return self.name.rpartition(".")[0]

    def keyword(self, name: str) -> ast.expr | None:
        """The value of a keyword argument, or None."""
        return next((each.value for each in self.node.keywords if each.arg == name), None)

    def argument(self, name: str, place: int) -> ast.expr | None:
        """The value of an argument by its name, or by its place from 0; None where it isn't given or told."""
        starred = any(isinstance(each, ast.Starred) for each in self.node.args)
        by_place = self.node.args[place] if len(self.node.args) > place and not starred else None
        return self.keyword(name) or by_place

    @cached_property
    def function(self) -> ast.FunctionDef | None:
        """The function that it stands in; None at the top of the file."""
        return next((node for node in self.around if isinstance(node, ast.FunctionDef)), None)

    @property
    def unpacks(self) -> bool:
        """Whether `**options` may hold more keywords."""
        return any(each.arg is None for each in self.node.keywords)


@dataclass(frozen=True)
class Script:
    """One Python file."""

    path: str
    """The file's name."""
    python: PythonScript

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, from the outside in; rules ask for them many times."""
        return tuple(ast.walk(self.python.tree))

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> full name."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Every call that has a name, in the order of the lines."""
        return tuple(call for call in self.every if not call.name.startswith("."))

    @cached_property
    def calls_of(self) -> Mapping[ast.FunctionDef | None, list[Call]]:
        """The calls by the function that they stand in."""
        found: dict[ast.FunctionDef | None, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.function, []).append(call)
        return found

    @cached_property
    def passes(self) -> tuple[Call, ...]:
        """Every backward pass; that of an expression, as in `scaler.scale(loss).backward()`, is `.backward`."""
        return tuple(call for call in self.every if call.method == "backward")

    @cached_property
    def every(self) -> tuple[Call, ...]:
        """Every call that may be reached, in the order of the lines; a method of what has no name is `.method`."""
        found = self._walk(self.python.tree, ())
        return tuple(sorted(found, key=lambda call: (call.node.lineno, call.node.col_offset)))

    def _walk(self, node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[Call]:
        if isinstance(node, ast.Call):
            method = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
            if name := self.name(node.func) or method:
                yield Call(node, name, around)
        for child in self._reached(node):
            yield from self._walk(child, (node, *around))

    def _reached(self, node: ast.AST) -> Iterator[ast.AST]:
        """The parts of a node, without the statements of a block that one above them never lets run."""
        for _, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield child
                if isinstance(child, ast.stmt) and self._ends(child):
                    break

    def _ends(self, node: ast.stmt) -> bool:
        """Whether nothing behind a statement in the same block is run."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self.name(node.value.func) in _EXITS
        return isinstance(node, ast.Raise | ast.Return | ast.Continue | ast.Break)

    def name(self, node: ast.expr) -> str:
        """The full dotted name of an expression; empty where it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        full = ".".join([self.imports.get(node.id, node.id), *parts])
        return _SAME.get(full, full)

    def called(self, *names: str) -> list[Call]:
        """The calls with one of these full names."""
        return [call for call in self.calls if call.name in names]

    def methods(self, *names: str) -> list[Call]:
        """The calls whose last part is one of these."""
        return [call for call in self.calls if call.method in names]

    def assigned(self, function: str, *, first: bool = False) -> set[str]:
        """Names that hold what calls of `function` return; the first of several where `first`."""
        held: set[str] = set()
        for node in self._made.get(function, ()):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                target = target.elts[0] if first else target
            held.add(ast.unparse(target))
        return held

    @cached_property
    def _made(self) -> Mapping[str, list[ast.Assign]]:
        """Assignments of what a call returns, by the function's name."""
        found: dict[str, list[ast.Assign]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                found.setdefault(self.name(node.value.func), []).append(node)
        return found

    def constant(self, node: ast.expr | None) -> Any:
        """The value of a literal, or of a name that is bound to one, once in the file; None for anything else."""
        found = self.bound(node)
        return found.value if isinstance(found, ast.Constant) else None

    def bound(self, node: ast.expr | None) -> ast.expr | None:
        """What a name that is bound once in the file is bound to; any other expression itself."""
        return self._bound_once.get(node.id) if isinstance(node, ast.Name) else node

    @cached_property
    def _bound_once(self) -> dict[str, ast.expr]:
        """Names with one assignment in the whole file, and what it assigns.

        What a `prepare` of accelerate gives back under the same name is the same object still.
        """
        nodes = list(self.nodes)
        wrapped = {
            id(each) for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and self.name(node.value.func).endswith(".prepare")
            for each in ast.walk(node.targets[0])
        }  # fmt: skip
        bound = Counter(
            node.id for node in nodes
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in wrapped
        )  # fmt: skip
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        return {
            target.id: value
            for node in nodes if isinstance(node, ast.Assign) for target, value in _pairs(node)
            if isinstance(target, ast.Name) and id(target) not in wrapped and bound[target.id] == 1
        }  # fmt: skip

    @cached_property
    def bound_at(self) -> Mapping[str, list[int]]:
        """The lines in which each name is bound."""
        found: dict[str, list[int]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.id, []).append(node.lineno)
        return found

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names that a function of the file takes as an argument."""
        return frozenset(node.arg for node in self.nodes if isinstance(node, ast.arg))

    @cached_property
    def functions(self) -> Mapping[str, ast.FunctionDef]:
        """The functions of the file, by name."""
        nodes = self.nodes
        return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}

    @cached_property
    def by_framework(self) -> bool:
        """Whether a Trainer, Accelerate or Lightning does the distributed part; the file's own class is none."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        used = {full.rpartition(".")[2] for full in self.imports.values()}
        used |= {call.method for call in self.calls} - {node.name for node in classes}
        bases = {base for node in classes for each in node.bases if (base := self.name(each)) != node.name}
        used |= {base.rpartition(".")[2] for base in bases - {node.name for node in classes}}
        return any(_TRAINERS.fullmatch(name) for name in used)

    @cached_property
    def own_loop(self) -> bool:
        """Whether the file itself sets up ranks and steps an optimizer or engine."""
        sets_up = self.called("torch.distributed.init_process_group", "deepspeed.init_distributed", DDP)
        return bool(sets_up or self.deepspeed) and bool(self.passes) and not self.by_framework

    @cached_property
    def engines(self) -> set[str]:
        """Names that hold what deepspeed.initialize returns first."""
        return self.assigned("deepspeed.initialize", first=True)

    @cached_property
    def accelerators(self) -> set[str]:
        """Names that hold an Accelerator."""
        return {name for each in ACCELERATOR for name in self.assigned(each)}

    @cached_property
    def sharded(self) -> set[str]:
        """Names that hold a model wrapped in FSDP."""
        return self.assigned(FSDP)

    @cached_property
    def deepspeed(self) -> list[Call]:
        """Calls of deepspeed.initialize."""
        return self.called("deepspeed.initialize")

    def hit(self, call: Call, message: str, fix: str) -> Hit:
        """A finding at a call."""
        return Hit(self.path, self.python.at(call.node), message, fix)


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is bound to what: of `a, b = x, y` each of the two."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def scripts(files: FileSet) -> Iterator[Script]:
    """The Python files."""
    return (_script(file.name, python) for file, python in files.pythons())


def _script(path: str, python: PythonScript) -> Script:
    """One for all rules, kept with the file: the tree is walked once, however many files there are."""
    kept = vars(python)
    if path not in kept:
        kept[path] = Script(path, python)
    found = kept[path]
    assert isinstance(found, Script)
    return found


def is_none(node: ast.expr) -> bool:
    """Whether an expression is `None` as it stands."""
    return isinstance(node, ast.Constant) and node.value is None
