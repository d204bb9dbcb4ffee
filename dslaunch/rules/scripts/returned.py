"""What a model's forward returns, against what a script does with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.made import Models, forward_of
from dslaunch.rules.scripts.modules import home_of, homes, modules_of
from dslaunch.rules.scripts.tree import Call, Script
from dslaunch.rules.settings import Settings

_LOSSES = re.compile(r"torch\.nn\.functional\.(?:\w+_loss|(?:binary_)?cross_entropy(?:_with_logits)?)")
_OBJECTS = re.compile(r"torch\.nn\.\w+Loss")


@rule("script.forward-tuple", severity="error", raised_by="torch", evidence="torch 2.13, run")
def forward_tuple(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A model whose forward returns several values, handed to a loss as if it were one."""
    for module, folder in modules_of(files):
        own = module.script
        losses = [call for call in own.calls if _is_loss(own, call)] if "oss" in own.python.text else []
        here, models = homes(module, folder) if losses else {}, Models(own)
        for call in losses:
            model = _model_in(own, call)
            found = forward_of(home_of(here, models.made(model.func))) if model is not None else None
            if found is not None and (size := _parts(found[1])):
                message = (
                    f"{found[0].name}.forward returns {size} values, and a loss takes one tensor: TypeError or "
                    "AttributeError."
                )
                yield own.hit(call, message, "Take the one that is meant: logits, _ = model(...).")


def _is_loss(script: Script, call: Call) -> bool:
    made = script.bound(call.node.func) if isinstance(call.node.func, ast.Name) else None
    held = script.name(made.func) if isinstance(made, ast.Call) else ""
    return bool(_LOSSES.fullmatch(call.name) or _OBJECTS.fullmatch(held)) and bool(call.node.args)


def _model_in(script: Script, call: Call) -> ast.Call | None:
    """The call whose value a loss gets as a whole: `cross_entropy(model(x), y)`, or by a name bound once."""
    given = script.bound(call.node.args[0])
    return given if isinstance(given, ast.Call) else None


def _parts(forward: ast.FunctionDef) -> int:
    """How many values a forward returns in any case; 0 where it may be one, or it isn't told."""
    waiting: list[ast.AST] = list(forward.body)
    sizes = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
            sizes.add(0 if any(isinstance(each, ast.Starred) for each in parts) else len(parts))
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return sizes.pop() if len(sizes) == 1 else 0

