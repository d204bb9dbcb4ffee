"""Modules of a model that don't fit one another: widths, channels, and heads that don't divide them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.scripts.widths import Clash, Width, size_of, through
from dslaunch.rules.settings import Settings

_RAN = "torch 2.13, run"
_SAME = frozenset({
    "dropout", "elu", "gelu", "leaky_relu", "log_softmax", "mish", "normalize", "relu", "relu_", "sigmoid", "silu",
    "softmax", "softplus", "tanh",
})  # fmt: skip
"""Functions and methods that keep every dimension of what they are given first."""
_MODULES = ("torch.nn.Module", "nn.Module", "torch.nn.modules.module.Module")
_HEADS: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "MultiheadAttention": (("embed_dim", 0), ("num_heads", 1)),
    "TransformerEncoderLayer": (("d_model", 0), ("nhead", 1)),
    "TransformerDecoderLayer": (("d_model", 0), ("nhead", 1)),
    "Transformer": (("d_model", 0), ("nhead", 1)),
    "GroupNorm": (("num_channels", 1), ("num_groups", 0)),
}  # fmt: skip
"""Modules that want the first argument to be a multiple of the second."""


@rule("script.module-sizes", severity="error", raised_by="torch", evidence=_RAN)
def module_sizes(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A module that takes another width or number of channels than the one before it gives."""
    for script in scripts(files):
        if "torch" not in script.python.text:
            continue
        rows = script.called("torch.nn.Sequential")
        inner = {part for call in rows for part in call.node.args}
        outer = (call for call in rows if call.node not in inner and _is_run(script, call))
        clashes = [through(script, call.node, None)[1] for call in outer]
        for node in script.nodes:
            if isinstance(node, ast.ClassDef) and any(script.name(base) in _MODULES for base in node.bases):
                clashes += Forward(script, node).clashes()
        told = set[ast.Call]()
        for clash in clashes:
            if clash is not None and clash.at not in told:
                told.add(clash.at)
                yield _hit(script, clash)


def _is_run(script: Script, call: Call) -> bool:
    """Whether a row of modules is called as one; some are only gone through, or asked for by number."""
    target = call.around[0] if call.around else None
    made = target.targets[0] if isinstance(target, ast.Assign) else None
    if isinstance(made, ast.Name):
        return f"{made.id}[" not in script.python.text
    return not isinstance(made, ast.Attribute) or f".{made.attr}(" in script.python.text


def _hit(script: Script, clash: Clash) -> Hit:
    what = "channels" if clash.got.axis == "channels" else "values"
    name = script.name(clash.at.func).rpartition(".")[2]
    by = script.name(clash.got.by.func).rpartition(".")[2]
    message = (
        f"{name} takes {ast.unparse(clash.taken)} {what}, and {by} in line {clash.got.by.lineno} gives it "
        f"{ast.unparse(clash.got.size)}: RuntimeError in the first forward pass."
    )
    return Hit(script.path, script.python.at(clash.at), message, "Make the two sizes the same.")


@rule("script.attention-heads", severity="error", raised_by="torch", evidence=_RAN)
def attention_heads(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Attention whose width the number of heads doesn't divide, or a GroupNorm whose channels the groups don't."""
    for script in scripts(files):
        for call in script.calls:
            wanted = _HEADS.get(call.name.removeprefix("torch.nn.")) if call.name.startswith("torch.nn.") else None
            if wanted is None or any(isinstance(node, ast.With | ast.Try) for node in call.around):
                continue
            whole, parts = (call.argument(*each) for each in wanted)
            sizes = [size_of(script, each, {}) if each is not None else None for each in (whole, parts)]
            if sizes[0] and sizes[1] and sizes[0] % sizes[1]:
                (name, _), (by, _) = wanted
                raises = "ValueError" if call.method == "GroupNorm" else "AssertionError"
                message = f"{name} {sizes[0]:g} is no multiple of {by} {sizes[1]:g}: {raises} as it is made."
                yield script.hit(call, message, f"Choose {by} so that it divides {name}.")


@dataclass
class Forward:
    """What goes through the modules of one class, line by line."""

    script: Script
    node: ast.ClassDef
    found: list[Clash] = field(default_factory=list)

    def clashes(self) -> list[Clash]:
        """The calls of modules in forward that get another size than they take."""
        methods = {each.name: each for each in self.node.body if isinstance(each, ast.FunctionDef)}
        init, forward = methods.get("__init__"), methods.get("forward")
        if init is None or forward is None:
            return []
        self.modules = self._modules(init)
        self._follow(forward.body, {})
        return self.found

    def _modules(self, init: ast.FunctionDef) -> dict[str, ast.expr]:
        """The attributes that are bound once in the class, to what __init__ makes under no condition."""
        own = set(ast.walk(self.node))
        counted: dict[str, int] = {}
        for each in self.script.nodes:
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                by_self = ast.unparse(each.value) == "self"
                if each in own or not by_self:  # `net.head = nn.Linear(...)` elsewhere in the file
                    counted[each.attr] = counted.get(each.attr, 0) + 1
        return {
            text: each.value for each in init.body if isinstance(each, ast.Assign)
            if (text := ast.unparse(each.targets[0])).startswith("self.") and counted.get(text[5:]) == 1
        }  # fmt: skip

    def _follow(self, body: list[ast.stmt], held: dict[str, Width]) -> None:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) and node.value is not None:
                got = self._width(node.value, held)
                for target in node.targets if isinstance(node, ast.Assign) else []:
                    _forget(target, held)
                    if isinstance(target, ast.Name) and got is not None:
                        held[target.id] = got
                continue
            for inner in ("body", "orelse", "finalbody"):
                branch = dict(held) if not isinstance(node, ast.For | ast.While) else {}
                self._follow(getattr(node, inner, []), branch)
            _forget(node, held)

    def _width(self, node: ast.expr, held: dict[str, Width]) -> Width | None:
        """The size along an axis that an expression has; None where it isn't told."""
        if isinstance(node, ast.Name):
            return held.get(node.id)
        if isinstance(node, ast.BinOp):
            one, other = self._width(node.left, held), self._width(node.right, held)
            if one is None or other is None or isinstance(node.op, ast.MatMult) or one.axis != other.axis:
                return None
            return one if ast.unparse(one.size) == ast.unparse(other.size) else None
        if not isinstance(node, ast.Call):
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    self._width(each, held)
            return None
        given = [self._width(each, held) for each in node.args]
        for each in node.keywords:
            self._width(each.value, held)
        module = self.modules.get(ast.unparse(node.func)) if isinstance(node.func, ast.Attribute) else None
        if module is not None:
            got, clash = through(self.script, module, given[0] if len(given) == 1 else None)
            self.found += [clash] if clash is not None else []
            return got
        name = self.script.name(node.func)
        if name.startswith("torch.") and name.rpartition(".")[2] in _SAME:
            return given[0] if given else None
        if isinstance(node.func, ast.Attribute):
            owner = self._width(node.func.value, held)
            return owner if node.func.attr in _SAME and not name.startswith("self.") else None
        return None


def _forget(node: ast.AST, held: dict[str, Width]) -> None:
    """Takes out the names that are bound within a statement."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            held.pop(each.id, None)
