"""Parts of a model under DistributedDataParallel that get no gradient, and that it waits for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.objects import beside
from dslaunch.rules.scripts.replicas import scope, without_gradients, wraps
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_RAN = "torch 2.13, run on two ranks"
_HAS_PARAMETERS = re.compile(
    r"(?:Linear|Conv\w+|Embedding|EmbeddingBag|LayerNorm|GroupNorm|BatchNorm\w*|LSTM|GRU|Transformer\w+"
    r"|MultiheadAttention|Parameter)\("
)
_FREEZES = re.compile(r"requires_grad_\(|requires_grad\s*=[^=]")
_LOOKS_THROUGH = re.compile(r"\bgetattr\(|children\(|\bmodules\(|__dict__|_modules|\bsetattr\(")
_READ = frozenset({"config", "device", "dtype", "eval", "hidden_size"})
"""What is asked of a part without its gradients."""


@rule("script.unused-part", severity="error", raised_by="torch", evidence=_RAN)
def unused_part(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A part of a model under DDP that nothing calls, or under no_grad alone: DDP waits for its gradients."""
    every = list(scripts(files))
    for script in every:
        made = [call for call, _, _ in wraps(script)]
        text = " ".join(sorted({ast.unparse(scope(script, each)) for each in made}))
        for other, node in _models(script, every, text) if made and not _hidden(script) else ():
            for name, at, value in _parts(node):
                uses = len(re.findall(rf"\b{re.escape(name)}\b", other.python.text))
                if uses == 1 and other is script and _HAS_PARAMETERS.search(ast.unparse(value)):
                    why = f"nothing uses {name}"
                elif _is_without_gradients(other, node, name) and _is_trained(other, value):
                    why = f"{name} is called under no_grad alone, and not frozen"
                else:
                    continue
                message = (
                    f"{why}, and DistributedDataParallel waits for its gradients: RuntimeError in the second "
                    "step, Expected to have finished reduction."
                )
                fix = "Take it out, freeze it before DDP, or give find_unused_parameters=True."
                yield Hit(other.path, other.python.at(at), message, fix)


def _hidden(script: Script) -> bool:
    """Whether a file freezes something, or reaches parts by other ways than their names."""
    return bool(_LOOKS_THROUGH.search(script.python.text) or _FREEZES.search(script.python.text))


def _models(script: Script, every: list[Script], text: str) -> Iterator[tuple[Script, ast.ClassDef]]:
    """The models that are made around DDP, of classes of the file or of one beside it."""
    for other in every if text else ():
        for node in other.python.tree.body:
            if not isinstance(node, ast.ClassDef) or not re.search(rf"\b{node.name}\(", text):
                continue
            full = script.imports.get(node.name, node.name)
            ours = other is script or (other in beside(script, full, every) and not _hidden(other))
            if ours and [other.name(base) for base in node.bases] == ["torch.nn.Module"]:
                yield other, node


def _is_without_gradients(script: Script, node: ast.ClassDef, name: str) -> bool:
    """Whether a part is called, and each time under no_grad."""
    own = set(ast.walk(node))
    calls = [
        call for call in script.calls
        if call.node in own and f"{call.name}.".startswith(f"self.{name}.") and call.method not in _READ
    ]  # fmt: skip
    if not calls or not all(without_gradients(call) for call in calls):
        return False
    called = {each for call in calls for each in ast.walk(call.node.func)}
    read = {each.value for each in own if isinstance(each, ast.Attribute) and each.attr in _READ}
    return all(
        each in called or each in read or isinstance(each.ctx, ast.Store)
        for each in own if isinstance(each, ast.Attribute) and ast.unparse(each) == f"self.{name}"
    )  # fmt: skip


def _is_trained(script: Script, value: ast.expr) -> bool:
    """Whether it makes a module that has parameters: torch's, a pretrained one, or one of a class of the file."""
    text = ast.unparse(value)
    if _HAS_PARAMETERS.search(text) or ".from_pretrained(" in text:
        return True
    name = script.name(value.func) if isinstance(value, ast.Call) else ""
    classes = (each for each in script.python.tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    return any(_HAS_PARAMETERS.search(ast.unparse(each)) for each in classes)


def _parts(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, ast.expr]]:
    """`self.NAME = ...(...)` in a class's own __init__."""
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
    init = next((each for each in functions if each.name == "__init__"), None)
    for each in ast.walk(init) if init is not None else ():
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
            name = re.fullmatch(r"self\.(\w+)", ast.unparse(each.targets[0]))
            if name:
                yield name.group(1), each, each.value
