"""What a script sets around the engine: leaf modules of ZeRO-3, and an autocast that the engine takes off."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.deepspeed.model import model_in
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast")
_MODELS = "transformers.models."


@rule(
    "zero.leaf-script", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/utils/z3_leaf_module.py set_z3_leaf_modules 0.19.8, run",
)  # fmt: skip
def leaves(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """set_z3_leaf_modules with classes of another model, or after the engine was made."""
    model = model_in(files)
    own = model.alone.classes if model is not None and model.alone is not None else frozenset()
    for script in scripts(files):
        for call in script.methods("set_z3_leaf_modules"):
            named = _classes(script, call)
            if model is not None and own and named and own.isdisjoint(named) and not list(guards(call)):
                names = listed(sorted(named))
                message = f"{model.said()}, which has no {names}: ValueError, none of them is found."
                yield script.hit(call, message, "Name a class of this model, or leave the call out.")
            engines = [
                each for each in script.deepspeed
                if each.node.lineno < call.node.lineno and function_of(each) is function_of(call)
            ]  # fmt: skip
            first = call.argument("model", 0)
            if engines and isinstance(first, ast.Name) and first.id in _handed(engines):
                message = "after deepspeed.initialize, which has set ZeRO-3's hooks already: it changes nothing."
                fix = "Call it before deepspeed.initialize."
                yield _later(script, call, message, fix)


def _later(script: Script, call: Call, message: str, fix: str) -> Hit:
    return Hit(script.path, script.python.at(call.node), message, fix, severity="wrong", raised_by="nobody")


def _handed(engines: list[Call]) -> set[str]:
    """The names of models that deepspeed.initialize is given."""
    given = (each.argument("model", 1) for each in engines)
    return {node.id for node in given if isinstance(node, ast.Name)}


def _classes(script: Script, call: Call) -> frozenset[str]:
    """The classes of transformers that a call names; empty where it names others too."""
    given = script.bound(call.argument("leaf_module_classes", 1))
    if not isinstance(given, ast.List | ast.Tuple):
        return frozenset()
    names = [script.name(each) for each in given.elts]
    told = all(name.startswith((_MODELS, "transformers.")) for name in names)
    return frozenset(name.rpartition(".")[2] for name in names) if told else frozenset()


@rule(
    "script.outer-autocast", severity="wrong", raised_by="nobody", since="0.17.2",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/torch_autocast.py autocast_if_enabled 0.19.8, run; "
    "runtime/engine.py forward 0.17.1 and 0.17.2",
)  # fmt: skip
def outer_autocast(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """torch.autocast around the engine, which switches it off for its own forward pass."""
    config = one_config(plan, files, settings)
    if config is None or config.on("torch_autocast.enabled"):
        return
    for script in scripts(files):
        for call in script.calls:
            if call.name in script.engines and _under_autocast(script, call):
                message = f"{call.name}() runs without this autocast: DeepSpeed switches it off, and warns once."
                yield script.hit(call, message, 'Use "bf16" or "torch_autocast" of the DeepSpeed JSON instead.')


def _under_autocast(script: Script, call: Call) -> bool:
    """Whether a `with torch.autocast(...)` that isn't switched off is around a call."""
    for node in call.around:
        for item in node.items if isinstance(node, ast.With) else ():
            made = item.context_expr
            if isinstance(made, ast.Call) and script.name(made.func) in _AUTOCAST:
                given = {each.arg: script.constant(each.value) for each in made.keywords}
                device = given.get("device_type") or (script.constant(made.args[0]) if made.args else "")
                return given.get("enabled", True) is True and device != "cpu"
    return False
