"""What training scripts save: whether torch.load reads it back, and whether safetensors writes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.objects import assigned, beside
from dslaunch.rules.scripts.tree import DDP, Call, Script, scripts
from dslaunch.rules.settings import Settings

_MADE: Mapping[str, str] = {
    "argparse.Namespace": "an argparse.Namespace", "numpy.random.get_state": "a numpy array",
    "numpy.array": "a numpy array", "numpy.zeros": "a numpy array", "numpy.ones": "a numpy array",
    "numpy.mean": "a number of numpy's", "numpy.float32": "a number of numpy's",
    "numpy.float64": "a number of numpy's",
    "pathlib.Path": "a pathlib.Path", "pathlib.PurePath": "a pathlib.PurePath",
    "datetime.datetime.now": "a datetime", "collections.defaultdict": "a defaultdict", DDP: "a whole model",
}  # fmt: skip
"""What calls return that torch.load doesn't take by default: torch 2.13, run with each."""
_DEEP = 4
"""Names, attributes and arguments that stand for one another are followed so far."""
_ALLOWED = ("safe_globals", "NO_WEIGHTS_ONLY")


@rule(
    "script.weights-only", severity="error", raised_by="torch",
    evidence="torch 2.13, run; PyTorch 2.6 release notes: torch.load",
)  # fmt: skip
def weights_only(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A checkpoint with more than tensors and plain values, which torch.load refuses since 2.6."""
    every = list(scripts(files))
    for script in every:
        if any(each in script.python.text for each in _ALLOWED):
            continue
        saved, refused = list(script.called("torch.save")), dict[ast.Call, str]()
        for call in script.called("torch.load") if saved else ():
            if call.unpacks or any(call.keyword(name) is not None for name in ("weights_only", "pickle_module")):
                continue
            same = [each for each in saved if _is_same(script, each, call)]
            for each in same:
                if each.node not in refused:
                    refused[each.node] = _refused(script, each, every)
            held = [refused[each.node] for each in same]
            if held and all(held):
                message = (
                    f"the file holds {held[0]}: torch.load takes tensors and plain values alone since 2.6, and "
                    "raises UnpicklingError."
                )
                fix = "Save plain values, such as vars(args); or give weights_only=False for a file of your own."
                yield script.hit(call, message, fix)


def _is_same(script: Script, save: Call, load: Call) -> bool:
    """Whether what is loaded is what was saved: by the same path, or by the keys that are read from it."""
    path, read = save.argument("f", 1), load.argument("f", 0)
    if path is not None and read is not None and not isinstance(read, ast.Constant):
        same = ast.unparse(path) == ast.unparse(read) and isinstance(read, ast.Name)
        if same and script.bound(read) is not None:
            return True
    if isinstance(path, ast.Constant) and isinstance(read, ast.Constant):
        return path.value == read.value
    keys, wanted = _keys(script, save), _wanted(script, load)
    return len(wanted) > 1 and wanted <= keys


def _keys(script: Script, save: Call) -> set[str]:
    return {name for name, _ in _items(script, save)}


def _items(script: Script, save: Call) -> list[tuple[str, ast.expr]]:
    """What a saved dictionary holds, by its names; nothing where it isn't written out."""
    given = save.argument("obj", 0)
    found = possible(script, given, save.around) if given is not None else []
    if len(found) != 1:
        return []
    made = found[0]
    if isinstance(made, ast.Dict):
        return [
            (key.value, value) for key, value in zip(made.keys, made.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]  # fmt: skip
    if isinstance(made, ast.Call) and script.name(made.func) == "dict":
        return [(each.arg, each.value) for each in made.keywords if each.arg]
    return []


def _wanted(script: Script, load: Call) -> set[str]:
    """The keys that are read from the name that a loaded file is bound to, in the same function."""
    made = next((each for each in load.around if isinstance(each, ast.Assign) and each.value is load.node), None)
    target = made.targets[0] if made is not None else None
    scope = next((each for each in load.around if isinstance(each, ast.FunctionDef)), script.python.tree)
    if not isinstance(target, ast.Name):
        return set()
    return {
        str(node.slice.value) for node in ast.walk(scope)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == target.id
        and isinstance(node.slice, ast.Constant)
    }  # fmt: skip


def _refused(script: Script, save: Call, every: list[Script]) -> str:
    """What a saved object holds that torch.load doesn't take; empty where nothing is seen."""
    given = save.argument("obj", 0)
    values = _items(script, save)
    waiting = list(reversed(values))
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, ast.Dict):
            waiting += [(name, each) for each in value.values]
        elif kind := _kind(script, value, save, every):
            return f'{kind} under "{name}"'
    if not values and given is not None:
        return _kind(script, given, save, every)
    return ""


def _kind(script: Script, node: ast.expr, save: Call, every: list[Script], deep: int = _DEEP) -> str:
    """What an expression makes, where torch.load refuses it."""
    found = [_moved(each) for each in possible(script, node, save.around) if not _is_read(script, each)]
    if isinstance(node, ast.Name) and not found:
        told = _is_namespace(script, node.id) or _is_handed_namespace(script, node.id, save, every)
        return "an argparse.Namespace" if told else ""
    if isinstance(node, ast.Attribute):
        return _held(script, node, save, every, deep)
    if isinstance(node, ast.Call) and script.name(node.func) in ("min", "max"):
        kinds = (_kind(script, each, save, every, deep - 1) for each in node.args) if deep else ()
        return next((kind for kind in kinds if kind == _MADE["numpy.mean"]), "")
    if len(found) != 1 or not isinstance(found[0], ast.Call):
        return ""
    call = found[0]
    name = script.name(call.func)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "parse_args":
        return "an argparse.Namespace"
    if name in _MADE:
        return _MADE[name]
    return _of_class(script, name)


def _held(script: Script, node: ast.Attribute, save: Call, every: list[Script], deep: int) -> str:
    """The kind of what an object holds, `self.args`: what its __init__ is handed, or a number of numpy's."""
    values = assigned(script, ast.unparse(node)) if deep else []
    kinds = [_kind(script, value, save, every, deep - 1) for each in values for value in _handed(script, each)]
    numbers = [kind for kind in kinds if kind == _MADE["numpy.mean"]]
    alike = len(set(kinds)) == 1 and len(values) == 1
    return numbers[0] if numbers else kinds[0] if alike else ""


def _handed(script: Script, value: ast.expr) -> list[ast.expr]:
    """What the calls of a class of the file hand to the argument of its __init__; any other value itself."""
    for node in script.python.tree.body if isinstance(value, ast.Name) else ():
        methods = (each for each in getattr(node, "body", []) if isinstance(each, ast.FunctionDef))
        own = (each for each in methods if each.name == "__init__")
        init = next((each for each in own if any(inner is value for inner in ast.walk(each))), None)
        names = [each.arg for each in init.args.args][1:] if init is not None else []
        if isinstance(node, ast.ClassDef) and isinstance(value, ast.Name) and value.id in names:
            given = [call.argument(value.id, names.index(value.id)) for call in script.called(node.name)]
            return [each for each in given if each is not None] if None not in given else []
    return [value]


def _is_read(script: Script, node: ast.expr) -> bool:
    """Whether it is what an earlier run has saved."""
    return isinstance(node, ast.Call) and script.name(node.func) == "torch.load"


def _moved(node: ast.expr) -> ast.expr:
    """`Net()` of `Net().to(device)` and `Net().cuda()`, which are the same object."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        node = node.func.value
    return node


_MOVES = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})


def _is_namespace(script: Script, name: str) -> bool:
    """Whether an argument of a function is what everywhere else in the file is what argparse made."""
    made = [
        node.value for node in script.nodes
        if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    ]  # fmt: skip
    return bool(made) and all(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "parse_args"
        for each in made
    )


def _is_handed_namespace(script: Script, name: str, save: Call, every: list[Script]) -> bool:
    """Whether the argument of a function is what argparse made wherever other files call it."""
    function = save.function
    names = [each.arg for each in function.args.args] if function is not None else []
    if function is None or name not in names or function not in script.python.tree.body:
        return False
    given = [
        (other, call.argument(name, names.index(name)))
        for other in every if other is not script for call in other.methods(function.name)
        if script in list(beside(other, call.name, every))
    ]  # fmt: skip
    told = (isinstance(each, ast.Name) and _is_namespace(other, each.id) for other, each in given)
    return bool(given) and all(told)


def _of_class(script: Script, name: str) -> str:
    """A model or a dataclass of the file, as a whole."""
    for node in script.python.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = {script.name(each) for each in node.bases}
            if "torch.nn.Module" in bases:
                return "a whole model"
            makers = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
            if not bases and any(script.name(each) == "dataclasses.dataclass" for each in makers):
                return f"an object of {name}"
    return ""


_TIES = re.compile(r"self\.([\w.]+)\.weight = self\.([\w.]+)\.weight")


@rule("script.tied-weights", severity="error", raised_by="python", evidence="safetensors 0.8.0, run")
def tied(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The state of a model with tied weights handed to safetensors' save_file, which refuses shared memory."""
    every = list(scripts(files))
    for script in every:
        for call in script.called("safetensors.torch.save_file", "safetensors.torch.save"):
            given = call.argument("tensors", 0)
            made = possible(script, given, call.around) if given is not None else []
            states = [each for each in made if ast.unparse(each).endswith(".state_dict()")]
            names = _tied_by(script, every) if states and len(states) == len(made) else None
            if names is not None:
                message = (
                    f"{names[0]}.weight and {names[1]}.weight are one tensor: RuntimeError, Some tensors share "
                    "memory, at the first save."
                )
                fix = "Call safetensors.torch.save_model(model, path), or take one of the names out."
                yield script.hit(call, message, fix)


def _tied_by(script: Script, every: list[Script]) -> tuple[str, str] | None:
    """The parts whose weights the one model that the script makes of the folder's classes ties."""
    found = {
        (ties.group(1), ties.group(2))
        for other in every for node in other.python.tree.body if isinstance(node, ast.ClassDef)
        if _makes(script, other, node.name, every)
        for ties in _TIES.finditer(ast.unparse(node))
    }  # fmt: skip
    return found.pop() if len(found) == 1 else None


def _makes(script: Script, other: Script, name: str, every: list[Script]) -> bool:
    """Whether a script makes an object of a class of its own, or of a file beside it."""
    calls = script.methods(name)
    return any(other is script or other in beside(script, call.name, every) for call in calls)
