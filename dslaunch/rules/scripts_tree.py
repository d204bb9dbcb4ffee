"""A training script's syntax tree as rules ask for it: calls by their full names, conditions, frameworks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from dslaunch.files.fileset import FileSet
from dslaunch.files.python import PythonScript
from dslaunch.rules.registry import Hit

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.utils.data.distributed.DistributedSampler": "torch.utils.data.DistributedSampler",
}
_TRAINERS = re.compile(r"(?:\w*Trainer|Accelerator|Fabric|LightningModule)")
_FIRST = re.compile(
    r"\brank\b|local_rank|global_rank|get_rank\(|process_index|is_main|is_master|main_process|master_process"
)


_FIRST_RANK: Mapping[tuple[type[ast.cmpop], int | None], bool] = {
    (ast.Eq, 0): True, (ast.Lt, 1): True, (ast.LtE, 0): True,
    (ast.NotEq, 0): False, (ast.Gt, 0): False, (ast.GtE, 1): False,
}  # fmt: skip
"""Comparisons of a rank that hold for the first one alone, or for all the others."""


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
    def imports(self) -> dict[str, str]:
        """Local name -> full name."""
        found: dict[str, str] = {}
        for node in ast.walk(self.python.tree):
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
        """Every call, in the order of the lines."""
        found = list(self._walk(self.python.tree, ()))
        return tuple(sorted(found, key=lambda call: (call.node.lineno, call.node.col_offset)))

    def _walk(self, node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[Call]:
        if isinstance(node, ast.Call) and (name := self.name(node.func)):
            yield Call(node, name, around)
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, (node, *around))

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
        for node in ast.walk(self.python.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if self.name(node.value.func) != function:
                    continue
                target = node.targets[0]
                if isinstance(target, ast.Tuple):
                    target = target.elts[0] if first else target
                held.add(ast.unparse(target))
        return held

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
        nodes = list(ast.walk(self.python.tree))
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
            node.targets[0].id: node.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and id(node.targets[0]) not in wrapped and bound[node.targets[0].id] == 1
        }  # fmt: skip

    @cached_property
    def bound_at(self) -> Mapping[str, list[int]]:
        """The lines in which each name is bound."""
        found: dict[str, list[int]] = {}
        for node in ast.walk(self.python.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.id, []).append(node.lineno)
        return found

    @cached_property
    def functions(self) -> Mapping[str, ast.FunctionDef]:
        """The functions of the file, by name."""
        nodes = ast.walk(self.python.tree)
        return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}

    @cached_property
    def by_framework(self) -> bool:
        """Whether a Trainer, Accelerate or Lightning does the distributed part."""
        used = {full.rpartition(".")[2] for full in self.imports.values()}
        used |= {call.method for call in self.calls}
        bases = {
            self.name(base).rpartition(".")[2]
            for node in ast.walk(self.python.tree) if isinstance(node, ast.ClassDef) for base in node.bases
        }  # fmt: skip
        return any(_TRAINERS.fullmatch(name) for name in used | bases)

    @cached_property
    def own_loop(self) -> bool:
        """Whether the file itself sets up ranks and steps an optimizer or engine."""
        sets_up = self.called("torch.distributed.init_process_group", "deepspeed.init_distributed", DDP)
        return bool(sets_up or self.deepspeed) and bool(self.methods("backward")) and not self.by_framework

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


def scripts(files: FileSet) -> Iterator[Script]:
    """The Python files."""
    return (_script(file.name, python) for file, python in files.pythons())


@lru_cache(maxsize=64)
def _script(path: str, python: PythonScript) -> Script:
    """One for all rules, so that the tree is walked once."""
    return Script(path, python)


def guards(call: Call) -> Iterator[tuple[ast.If, bool]]:
    """The `if` statements around a call within its function, and whether it stands in the first branch."""
    child: ast.AST = call.node
    for node in call.around:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and child is not node.test:
            yield node, child in node.body
        child = node


def function_of(call: Call) -> ast.AST | None:
    """The function that a call stands in; None at the top of the file."""
    return next((node for node in call.around if isinstance(node, ast.FunctionDef)), None)


def on_one_rank(test: ast.expr) -> bool | None:
    """Whether a condition holds on one rank (True), on all others (False), or is about something else (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = on_one_rank(test.operand)
        if inner is None:
            return True if _FIRST.search(ast.unparse(test.operand)) and _is_rank(test.operand) else None
        return not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and _is_rank(test.left):
        right = test.comparators[0]
        if isinstance(right, ast.List | ast.Tuple) and isinstance(test.ops[0], ast.In | ast.NotIn):
            values = {ast.unparse(each) for each in right.elts}
            return isinstance(test.ops[0], ast.In) if "0" in values and values <= {"-1", "0"} else None
        number = right.value if isinstance(right, ast.Constant) and type(right.value) is int else None
        found = _FIRST_RANK.get((type(test.ops[0]), number))
        if found is not None:
            return found
    text = ast.unparse(test)
    if isinstance(test, ast.Call | ast.Name | ast.Attribute) and re.search(
        r"is_(?:main|master)|(?:main|master)_process$", text
    ):
        return True
    return None


def _is_rank(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and bool(_FIRST.search(text))


def one_rank_guard(call: Call) -> bool | None:
    """True: only the first rank gets to the call; False: all but it; None: no such condition is around it."""
    for node, first_branch in guards(call):
        if first_branch and _first_or_at_times(node.test):
            return True
        for told in map(on_one_rank, _parts(node, call) if first_branch else [node.test]):
            if told is not None:
                return told if first_branch else not told
    return None


def _first_or_at_times(test: ast.expr) -> bool:
    """Whether it holds on the first rank always, on the others in each N-th step: `rank == 0 or step % 9 == 0`."""
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.Or):
        return False
    first = [bool(on_one_rank(each)) for each in test.values]
    others = [each for each, is_first in zip(test.values, first, strict=True) if not is_first]
    return any(first) and bool(others) and all(
        isinstance(each, ast.Compare) and isinstance(each.left, ast.BinOp) and isinstance(each.left.op, ast.Mod)
        for each in others
    )  # fmt: skip


def _parts(node: ast.If | ast.IfExp, call: Call) -> list[ast.expr]:
    """What has to hold for a call in the first branch; the test alone where the other branch calls the same."""
    others = [each for part in node.orelse for each in ast.walk(part)] if isinstance(node, ast.If) else []
    names = (ast.unparse(each) for each in others if isinstance(each, ast.Attribute | ast.Name))
    same = any(name.rpartition(".")[2] == call.method for name in names)
    joined = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) and not same
    return node.test.values if isinstance(node.test, ast.BoolOp) and joined else [node.test]


def is_none(node: ast.expr) -> bool:
    """Whether an expression is `None` as it stands."""
    return isinstance(node, ast.Constant) and node.value is None
