"""The types that a training script gives its model and its samples, against the precision that trains them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import LOADER, Call, Script, scripts
from dslaunch.rules.settings import Settings

_TYPES = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}
_METHODS = {"half": "fp16", "bfloat16": "bf16"}
_WORDS = {"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
_LOADS = ("from_pretrained", "from_config", "_from_config")


@rule(
    "script.model-type", severity="wrong", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _configure_distributed_model 0.19.8, run",
)  # fmt: skip
def model_type(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model that the script turns into another 16-bit type than the engine's, or into fp16 without its scale."""
    config = one_config(plan, files, settings)
    if config is None or config.precision_open or config.on("torch_autocast.enabled"):
        return
    for script in scripts(files):
        if len(script.deepspeed) != 1 or script.by_framework:
            continue
        model, made = script.deepspeed[0].argument("model", 1), script.deepspeed[0].node.lineno
        for call in script.every if isinstance(model, ast.Name) else ():
            assert isinstance(model, ast.Name)
            kind = _cast(script, call, model.id)
            if kind and call.node.lineno <= made:
                yield from _judged(script, call, kind, config)


def _judged(script: Script, call: Call, kind: str, config: Config) -> Iterator[Hit]:
    if config.precision == "fp32" and kind == "fp16":
        message = (
            "the model is fp16 here, and the DeepSpeed JSON has no fp16: it trains without a loss scale, and "
            "small gradients become 0."
        )
        yield script.hit(
            call, message, 'Write "bf16": {"enabled": true}, or fp16, and leave the type out here.'
        )
    elif config.precision not in ("fp32", kind):
        message = (
            f"the model is {kind} here, and DeepSpeed casts it to {config.precision}: the weights have been "
            "rounded to both, and what the script makes in its own type doesn't fit the model."
        )
        found = script.hit(call, message, f"Use {config.precision} here too, or leave the type out.")
        yield found if call.method not in _LOADS else replace(found, severity="info")


def _cast(script: Script, call: Call, model: str) -> str:
    """fp16 or bf16 where a call gives the model that type; empty for any other call."""
    if call.method in _LOADS:
        node = script.bound(ast.Name(model, ast.Load()))
        given = call.keyword("dtype") or call.keyword("torch_dtype")
        return _kind(script, given) if node is call.node else ""
    if call.owner != model and not _of_made(script, call, model):
        return ""
    if call.method in _METHODS and not call.node.args:
        return _METHODS[call.method]
    given = call.keyword("dtype") or (call.node.args[-1] if call.node.args else None)
    return _kind(script, given) if call.method == "to" else ""


def _of_made(script: Script, call: Call, model: str) -> bool:
    """`model = Net().half()`."""
    return script.bound(ast.Name(model, ast.Load())) is call.node


def _kind(script: Script, node: ast.expr | None) -> str:
    found = script.bound(node)
    if isinstance(found, ast.Constant):
        return _WORDS.get(str(found.value), "")
    return _TYPES.get(script.name(found), "") if found is not None else ""


@rule(
    "script.input-type", severity="error", raised_by="torch",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py forward, _cast_inputs_half 0.19.8, run",
)  # fmt: skip
def input_type(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Samples of fp32 for an engine whose weights are fp16 or bf16, and nothing that casts them."""
    config = one_config(plan, files, settings)
    if config is None or config.precision == "fp32" or config.precision_open:
        return
    if config.on("torch_autocast.enabled") or config.on("fp16.auto_cast"):
        return
    every = list(scripts(files))
    if any(_CASTS.search(_FP32.sub("", script.python.text)) for script in every):
        return
    kind = "half()" if config.precision == "fp16" else "bfloat16()"
    for script in every:
        if len(script.deepspeed) != 1 or script.by_framework or not _is_known(script, every):
            continue
        for call in script.calls if script.engines else ():
            for given in call.node.args if call.name in script.engines else ():
                name = ast.unparse(_unmoved(given))
                if made := _float_input(script, call, name):
                    message = (
                        f"{name} comes from {made} as fp32, and the engine's weights are {config.precision}: "
                        "RuntimeError in the first pass, input and weight should be the same type."
                    )
                    fix = f"Hand over {name}.{kind}, or switch torch_autocast on in the DeepSpeed JSON."
                    yield script.hit(call, message, fix)
                    break


_CASTS = re.compile(r"\.half\b|float16|dtype|autocast|auto_cast|\.type\(|\.type_as\(|HalfTensor|\.weight\b")
"""What a script holds that casts something, or may."""
_FP32 = re.compile(r"dtype\s*=\s*torch\.float(?:32)?\b(?!\d)")
_DRAWS = ("torch.rand", "torch.randn")
_KNOWN = ("torch.nn.", "torchvision.models.", "timm.")


def _is_known(script: Script, every: list[Script]) -> bool:
    """Whether the files show what the model does, or it is one that casts nothing."""
    made = script.bound(script.deepspeed[0].argument("model", 1))
    name = script.name(made.func) if isinstance(made, ast.Call) else ""
    classes = {node.name for each in every for node in each.nodes if isinstance(node, ast.ClassDef)}
    return name.startswith(_KNOWN) or name.rpartition(".")[2] in classes


def _unmoved(node: ast.expr) -> ast.expr:
    """`x` of `x.to(device)` and `x.cuda()`, which are the same values elsewhere."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.value if isinstance(func, ast.Attribute) and func.attr in ("to", "cuda") else node


def _float_input(script: Script, call: Call, name: str) -> str:
    """What makes a part of a loop's batch a tensor of fp32; empty where that isn't seen."""
    scope = call.function or script.python.tree
    bound = [
        node for node in ast.walk(scope) if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    ]  # fmt: skip
    other = [node.value for node in bound if ast.unparse(_unmoved(node.value)) != name]
    if other:
        drawn = len(bound) == 1 and isinstance(other[0], ast.Call) and script.name(other[0].func) in _DRAWS
        return ast.unparse(other[0].func) if drawn and isinstance(other[0], ast.Call) else ""
    loops = (node.target for node in ast.walk(scope) if isinstance(node, ast.For))
    place = next((parts.index(name) for parts in map(_parts, loops) if name in parts), None)
    collates = [found for each in script.called(LOADER) if (found := each.keyword("collate_fn")) is not None]
    if place is None or any(ast.unparse(each) not in script.functions for each in collates):
        return ""
    if script.methods("ToTensor"):
        return "ToTensor" if place == 0 else ""
    sets = [
        node for node in script.nodes if isinstance(node, ast.ClassDef)
        and any(getattr(each, "name", "") == "__getitem__" for each in node.body)
    ]  # fmt: skip
    return _given(sets[0], script, place) if len(sets) == 1 else ""


def _parts(target: ast.expr) -> list[str]:
    """The names of `(image, label)` in what a loop binds, also behind a number: `step, (image, label)`."""
    parts = target.elts if isinstance(target, ast.Tuple) else []
    if len(parts) == 2 and isinstance(parts[1], ast.Tuple):
        parts = parts[1].elts
    return [ast.unparse(each) for each in parts]


def _given(node: ast.ClassDef, script: Script, place: int) -> str:
    """What a data set of the file makes that part of its samples of, where it is fp32."""
    get = next((each for each in node.body if getattr(each, "name", "") == "__getitem__"), None)
    ends = [each.value for each in ast.walk(get) if isinstance(each, ast.Return)] if get is not None else []
    end = ends[0] if len(ends) == 1 else None
    if isinstance(end, ast.Call) and ast.unparse(end.func) == "tuple" and len(end.args) == 1:
        each = end.args[0]
        return _fp32(script, node, each.elt) if isinstance(each, ast.GeneratorExp | ast.ListComp) else ""
    if not isinstance(end, ast.Tuple) or place >= len(end.elts):
        return ""
    return _fp32(script, node, end.elts[place])


def _fp32(script: Script, node: ast.AST, part: ast.expr) -> str:
    """What makes an expression fp32: it is drawn, cast, or divided; also by the one thing that a name holds."""
    held = ast.unparse(part.value if isinstance(part, ast.Subscript) else part)
    made = [
        each.value for each in ast.walk(node)
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == held
    ]  # fmt: skip
    value = made[0] if len(made) == 1 else part
    if isinstance(value, ast.BinOp):
        whole = isinstance(value.right, ast.Constant) and isinstance(value.op, ast.Div)
        return "a division" if whole and "torch.from_numpy(" in ast.unparse(value.left) else ""
    if not isinstance(value, ast.Call):
        return ""
    name = script.name(value.func)
    if name in _DRAWS or (name == "torch.tensor" and _FP32.search(ast.unparse(value))):
        return name
    is_float = isinstance(value.func, ast.Attribute) and value.func.attr == "float"
    return ".float()" if is_float and not value.args else ""


@rule(
    "script.half-weights", severity="error", raised_by="torch",
    evidence="torch 2.13 torch.amp.GradScaler.unscale_, run; huggingface/transformers 5.24.0",
)  # fmt: skip
def half_weights(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model of fp16 that is trained with a GradScaler, which wants weights of fp32."""
    for script in scripts(files) if not settings.huggingface else ():
        scaled = _scaled_models(script)
        if not scaled or _adapts(script):
            continue
        by_deepspeed = any("deepspeed" in file.text.lower() for file in files.files)
        for call in script.every if not by_deepspeed else ():
            for name in scaled:
                if _cast(script, call, name) == "fp16":
                    message = (
                        f"{name} is fp16 here, and trains with a GradScaler: ValueError in the first step, "
                        "Attempting to unscale FP16 gradients."
                    )
                    yield script.hit(call, message, "Leave the weights fp32: autocast computes in fp16 by itself.")


_ADAPTS = re.compile(r"peft|lora|float32|FullySharded|fsdp|adapter|requires_grad|deepspeed", re.IGNORECASE)
"""What a script names that may train weights of another type than the model's, or without torch's GradScaler."""


def _adapts(script: Script) -> bool:
    to_fp32 = (re.search(_PARAMETERS, call.owner) for call in script.methods("float"))
    return any(to_fp32) or any(_ADAPTS.search(word) for word in _words(script))


_PARAMETERS = r"(?:^p|param\w*|weight|model|module)(?:\.data)?$"


def _words(script: Script) -> Iterator[str]:
    """The names in a script: no comment, no text."""
    yield from script.imports.values()
    for node in script.nodes:
        yield str(getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "arg", ""))


def _scaled_models(script: Script) -> set[str]:
    """Names of models whose gradients are scaled: the Trainer's with fp16, or those of an optimizer that is."""
    arguments = [call for call in script.calls if call.name in _ARGUMENTS]
    if len(arguments) == 1 and script.constant(arguments[0].keyword("fp16")) is True:
        takers = script.called("transformers.Trainer", "transformers.Seq2SeqTrainer")
        return {model.id for call in takers if isinstance(model := call.argument("model", 0), ast.Name)}
    if script.by_framework:
        return set()
    scalers = {name for each in _SCALERS for name in script.assigned(each)}
    steps = {
        ast.unparse(call.node.args[0]) for call in script.methods("step")
        if call.owner in scalers and call.node.args
    }  # fmt: skip
    found: set[str] = set()
    for name in steps:
        made = script.bound(ast.Name(name, ast.Load()))
        given = made.args[0] if isinstance(made, ast.Call) and made.args else None
        func = given.func if isinstance(given, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr == "parameters":
            found.add(ast.unparse(func.value))
    return found


_ARGUMENTS = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
