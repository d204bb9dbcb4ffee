"""How many values or channels torch's modules take and give, as far as their arguments are written out."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Script

Axis = Literal["last", "channels"]
_TRIED = (
    1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 100, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024,
    1152, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192,
)  # fmt: skip
"""Sizes that a name which nothing tells may have: two expressions of it differ where they do for each of these."""
_DEEP = 8
"""Names that stand for one another are followed so far."""
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_SAME = frozenset({
    "AlphaDropout", "CELU", "Dropout", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
    "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax",
    "Softplus", "Softsign", "Tanh", "Tanhshrink",
})  # fmt: skip
"""Modules of torch.nn that keep every dimension."""
_KEEP_CHANNELS = frozenset({
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d", "AvgPool1d", "AvgPool2d",
    "AvgPool3d", "Dropout2d", "Dropout3d", "MaxPool1d", "MaxPool2d", "MaxPool3d", "Upsample", "ZeroPad2d",
})  # fmt: skip
_CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_NORMS = ("BatchNorm2d", "BatchNorm3d")
_SIZED: Mapping[str, tuple[Axis, str | None, str, int, int]] = {
    "Linear": ("last", "in_features", "out_features", 0, 1),
    "Embedding": ("last", None, "embedding_dim", 0, 1),
    "LayerNorm": ("last", "normalized_shape", "normalized_shape", 0, 0),
    "RMSNorm": ("last", "normalized_shape", "normalized_shape", 0, 0),
    "TransformerEncoderLayer": ("last", "d_model", "d_model", 0, 0),
    **dict.fromkeys(_CONVOLUTIONS, ("channels", "in_channels", "out_channels", 0, 1)),
    **dict.fromkeys(_NORMS, ("channels", "num_features", "num_features", 0, 0)),
    "GroupNorm": ("channels", "num_channels", "num_channels", 1, 1),
}  # fmt: skip
"""Of each module: along which axis, the arguments that it takes and gives by, and their places: torch 2.13."""


@dataclass(frozen=True)
class Width:
    """A size along one axis, and the call that it comes from."""

    axis: Axis
    size: ast.expr
    by: ast.Call


@dataclass(frozen=True)
class Clash:
    """A module that takes another size than it gets."""

    at: ast.Call
    taken: ast.expr
    got: Width


def through(script: Script, module: ast.expr, got: Width | None) -> tuple[Width | None, Clash | None]:
    """What comes out of a module that `got` goes into, and where that doesn't fit."""
    if not isinstance(module, ast.Call):
        return None, None
    name = script.name(module.func)
    if not name.startswith("torch.nn."):
        return None, None
    kind = name.removeprefix("torch.nn.")
    if kind == "Sequential":
        return _sequence(script, module, got)
    if kind in _SAME or (kind in _KEEP_CHANNELS and got is not None and got.axis == "channels"):
        return got, None
    if kind not in _SIZED:
        return None, None
    axis, wants, gives, at, to = _SIZED[kind]
    taken = _argument(module, wants, at) if wants else None
    clash = None
    if taken is not None and got is not None and got.axis == axis and unequal(script, taken, got.size):
        clash = Clash(module, taken, got)
    given = _argument(module, gives, to)
    return (Width(axis, given, module) if given is not None else None), clash


def _sequence(script: Script, module: ast.Call, got: Width | None) -> tuple[Width | None, Clash | None]:
    first: Clash | None = None
    for each in module.args:
        got, clash = through(script, each, got)
        first = first or clash
    return (None if module.keywords else got), first


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    by_name = next((each.value for each in call.keywords if each.arg == name), None)
    return by_name if by_name is not None else call.args[place] if len(call.args) > place else None


def unequal(script: Script, one: ast.expr, other: ast.expr) -> bool:
    """Whether two sizes differ for certain: as numbers, or for each value of the one name that both hold."""
    names = [set(_open(script, each, _DEEP)) for each in (one, other)]
    if ast.unparse(one) == ast.unparse(other) or names[0] != names[1] or len(names[0]) > 1:
        return False
    name = next(iter(names[0]), "")
    for value in _TRIED if name else (0,):
        left, right = (size_of(script, each, {name: value}) for each in (one, other))
        if left is None or right is None or left == right:
            return False
    return True


def size_of(script: Script, node: ast.expr, held: Mapping[str, float], deep: int = _DEEP) -> float | None:
    """A size as a number, with what names are given; None where it can't be reckoned."""
    text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    if (text and text in held) or not deep:
        return held.get(text)
    found = script.bound(node) if isinstance(node, ast.Name) else node
    if isinstance(found, ast.Constant) and type(found.value) in (int, float):
        return float(found.value) if isinstance(found.value, int | float) else None
    if isinstance(found, ast.BinOp) and type(found.op) in _OPERATORS:
        left, right = (size_of(script, each, held, deep - 1) for each in (found.left, found.right))
        if left is None or right is None or (right == 0 and isinstance(found.op, ast.FloorDiv)):
            return None
        return _OPERATORS[type(found.op)](left, right)
    if isinstance(found, ast.Call) and script.name(found.func) == "int" and len(found.args) == 1:
        inner = size_of(script, found.args[0], held, deep - 1)
        return float(int(inner)) if inner is not None else None
    return None


def _open(script: Script, node: ast.expr, deep: int) -> Iterator[str]:
    """The names of a size that nothing tells the value of; one that is bound again is another in each line."""
    here = f"{ast.unparse(node)} in line {node.lineno}"
    if isinstance(node, ast.Name):
        found = script.bound(node)
        if found is None:
            yield here if script.bound_at.get(node.id) else node.id
        elif deep:
            yield from _open(script, found, deep - 1)
        else:
            yield here
    elif isinstance(node, ast.Attribute):
        yield here if len(assigned(script, ast.unparse(node))) > 1 else ast.unparse(node)
    elif isinstance(node, ast.BinOp | ast.Call) and deep:
        for each in (node.left, node.right) if isinstance(node, ast.BinOp) else node.args:
            yield from _open(script, each, deep - 1)
    elif not isinstance(node, ast.Constant):
        yield here
