"""What the classes of a model do within, which the engine's types and ZeRO-3's sharding don't fit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_DEEP = 4
"""Classes within classes that are followed so far."""
_COPIES = (
    "torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder", "torch.nn.Transformer",
)  # fmt: skip
"""What makes layers by copying one of them: torch/nn/modules/transformer.py _get_clones 2.13."""


@rule(
    "script.zero-init-copies", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/zero/partition_parameters.py Init 0.19.8, run",
)  # fmt: skip
def zero_init_copies(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Layers that are copied under deepspeed.zero.Init: the copies hold no part of the weights."""
    every = list(scripts(files))
    for script in every:
        for call in script.calls if "zero.Init" in script.python.text else ():
            if not _under_init(script, call) or call.method == "Init":
                continue
            if found := _copied(every, script, call.node, _DEEP):
                message = (
                    f"{found} copies layers whose weights deepspeed.zero.Init has shared out already: the copies "
                    "stay empty, AssertionError in the first pass."
                )
                fix = "Make each layer anew, in an nn.ModuleList, or build the model outside of zero.Init."
                yield script.hit(call, message, fix)
                return


def _under_init(script: Script, call: Call) -> bool:
    """Whether a `with deepspeed.zero.Init(...)` that isn't switched off is around a call."""
    for node in call.around:
        for item in node.items if isinstance(node, ast.With) else ():
            made = item.context_expr
            if isinstance(made, ast.Call) and script.name(made.func) == "deepspeed.zero.Init":
                return not any(each.arg == "enabled" for each in made.keywords)
    return False


def _copied(every: list[Script], script: Script, call: ast.Call, deep: int) -> str:
    """The call that copies layers where a class of the files is made; empty where none does."""
    name = script.name(call.func)
    if name in _COPIES:
        return name.rpartition(".")[2]
    made = _class(every, name)
    for other, node in (made,) if made and deep > 0 else ():
        begin = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
        for each in ast.walk(begin) if begin is not None else ():
            if isinstance(each, ast.Call):
                found = _copied(every, other, each, deep - 1)
                copies = begin is not None and other.name(each.func) == "copy.deepcopy"
                if copies and _is_layer_of(every, other, begin or node, each):
                    found = "copy.deepcopy"
                if found:
                    return found
    return ""


def _is_layer_of(every: list[Script], script: Script, begin: ast.stmt, copies: ast.Call) -> bool:
    """Whether what is copied is a layer that the same function makes."""
    text = ast.unparse(copies.args[0]) if copies.args else ""
    made = [
        node.value for node in ast.walk(begin)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == text
    ]  # fmt: skip
    names = [script.name(each.func) for each in made if isinstance(each, ast.Call)]
    return any(name.startswith("torch.nn.") or _is_module(_class(every, name)) for name in names)


def _is_module(made: tuple[Script, ast.ClassDef] | None) -> bool:
    return made is not None and any(made[0].name(base) == "torch.nn.Module" for base in made[1].bases)


def _class(every: list[Script], name: str) -> tuple[Script, ast.ClassDef] | None:
    """The one class of the files with this name."""
    last = name.rpartition(".")[2]
    found = [
        (script, node) for script in every for node in script.nodes
        if isinstance(node, ast.ClassDef) and node.name == last
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


@rule(
    "script.inner-type", severity="error", raised_by="torch",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_distributed_model 0.19.8, run",
)  # fmt: skip
def inner_type(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model that makes a tensor of fp32, a timestep's, for its own layer of fp16 or bf16."""
    config = one_config(plan, files, settings)
    if config is None or config.precision == "fp32" or config.precision_open:
        return
    every = list(scripts(files))
    engines = [each for script in every if not script.by_framework for each in script.deepspeed]
    casts = ("autocast", "set_default_dtype")
    autocast = config.on("torch_autocast.enabled") or any(
        word in each.python.text for each in every for word in casts
    )
    if len(engines) != 1 or autocast:
        return
    for script in every:
        for node in script.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            if found := _fed(script, node) or _drawn(every, script, node):
                call, given = found
                message = (
                    f"{given} is fp32, and {ast.unparse(call.func)} is {config.precision} under DeepSpeed: "
                    "RuntimeError in the first pass, they must have the same dtype."
                )
                fix = f"Cast it to the type of {ast.unparse(call.func)}'s weights: {given}.to(...)."
                yield Hit(script.path, script.python.at(call), message, fix)


def _fed(script: Script, made: ast.ClassDef) -> tuple[ast.Call, str] | None:
    """The layer in a class's forward that gets what a function of the file makes of fp32, and that function."""
    methods = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
    if not {"__init__", "forward"} <= methods.keys():
        return None
    layers = {
        ast.unparse(node.targets[0]) for node in ast.walk(methods["__init__"])
        if isinstance(node, ast.Assign) and _is_layer(script, node.value)
    }  # fmt: skip
    held = {
        ast.unparse(node.targets[0]): node.value for node in ast.walk(methods["forward"])
        if isinstance(node, ast.Assign)
    }  # fmt: skip
    stored = [ast.unparse(node) for node in ast.walk(methods["forward"])
              if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]  # fmt: skip
    for call in ast.walk(methods["forward"]):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in layers or len(call.args) != 1:
            continue
        given = call.args[0]
        if isinstance(given, ast.Name) and stored.count(given.id) == 1:
            given = held.get(given.id, given)
        name = script.name(given.func) if isinstance(given, ast.Call) else ""
        function = script.functions.get(name)
        if function is not None and _returns_fp32(function):
            return call, f"{name}(...)"
    return None


def _drawn(every: list[Script], script: Script, made: ast.ClassDef) -> tuple[ast.Call, str] | None:
    """The layer, or part with such a layer, that gets noise of fp32, also mixed with values of 16 bits."""
    methods = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
    if not {"__init__", "forward"} <= methods.keys():
        return None
    forward = methods["forward"]
    held = {
        ast.unparse(node.targets[0]): node.value for node in ast.walk(methods["__init__"])
        if isinstance(node, ast.Assign)
    }  # fmt: skip
    names_of = (node for node in ast.walk(forward) if isinstance(node, ast.Name))
    stored = [node.id for node in names_of if isinstance(node.ctx, ast.Store)]
    names: set[str] = set()
    for node in forward.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if stored.count(name) == 1 and _is_noise(script, node.value, names):
                names.add(name)
    for call in ast.walk(forward):
        part = held.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or part is None:
            continue
        for place, given in enumerate(call.args):
            if isinstance(given, ast.Name) and given.id in names and (
                (len(call.args) == 1 and _is_layer(script, part)) or _takes(every, script, part, place)
            ):
                return call, given.id
    return None


def _is_noise(script: Script, value: ast.expr, names: set[str]) -> bool:
    """Whether an expression is drawn as fp32, or sums and products of such a tensor."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        return _is_noise(script, value.left, names) or _is_noise(script, value.right, names)
    if isinstance(value, ast.Call):
        typed = any(each.arg in ("dtype", None) for each in value.keywords)
        return script.name(value.func) in ("torch.randn", "torch.rand") and bool(value.args) and not typed
    return isinstance(value, ast.Name) and value.id in names


def _takes(every: list[Script], script: Script, part: ast.expr, place: int) -> bool:
    """Whether a class of the files hands its argument at that place to a layer as it is."""
    found = _class(every, script.name(part.func)) if isinstance(part, ast.Call) else None
    if found is None:
        return False
    other, made = found
    methods = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
    begin, forward = methods.get("__init__"), methods.get("forward")
    given = [each.arg for each in forward.args.args][1:] if forward is not None else []
    if begin is None or forward is None or place >= len(given):
        return False
    name = given[place]
    layers = {
        ast.unparse(node.targets[0]) for node in ast.walk(begin)
        if isinstance(node, ast.Assign) and _is_layer(other, node.value)
    }  # fmt: skip
    nodes = list(ast.walk(forward))
    if any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in nodes):
        return False
    calls = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in layers)
    return any([ast.unparse(each) for each in call.args] == [name] for call in calls)


def _is_layer(script: Script, value: ast.expr) -> bool:
    """Whether a layer with weights comes first: nn.Linear, or an nn.Sequential that begins with one."""
    if not isinstance(value, ast.Call):
        return False
    name = script.name(value.func)
    if name == "torch.nn.Sequential":
        return bool(value.args) and _is_layer(script, value.args[0])
    return re.fullmatch(r"torch\.nn\.(?:Linear|Conv[123]d)", name) is not None


_OTHER = re.compile(
    r"\.to\(|\.type|\.half\b|float16|\.dtype\b|\.astype|\.(?:long|int|bool)\(|arg(?:max|min|sort)|[<>]|=="
)
"""What may give a value another type than fp32."""
_SHAPES = ("shape", "size", "ndim", "device", "numel", "item", "tolist")
_FP32 = re.compile(r"\.float\(\)|dtype=torch\.float(?:32)?\b")


def _returns_fp32(function: ast.FunctionDef) -> bool:
    """Whether what a function returns is computed from a tensor that it makes of fp32, and cast no more."""
    body = "\n".join(ast.unparse(each) for each in function.body)
    ends = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    if _OTHER.search(body) or not ends:
        return False
    names: set[str] = set()
    for node in ast.walk(function):  # in the order of the lines, within one block
        if isinstance(node, ast.Assign) and _is_of(node.value, names):
            parts = (each for target in node.targets for each in ast.walk(target))
            names |= {each.id for each in parts if isinstance(each, ast.Name)}
    return all(end is not None and _is_of(end, names) for end in ends)


def _is_of(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression holds a tensor of fp32: made there, or by a name, and not its shape alone."""
    parts = (each for each in ast.walk(value) if isinstance(each, ast.Attribute))
    if any(each.attr in _SHAPES and ast.unparse(each.value) in names for each in parts):
        return False
    held = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
    return bool(_FP32.search(ast.unparse(value)) or held & names)
