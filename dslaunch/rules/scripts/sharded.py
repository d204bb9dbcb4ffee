"""Training scripts that fill a model with weights while each rank holds but its part of every parameter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.guards import function_of
from dslaunch.rules.scripts.tree import FULLY_SHARD, INIT, Call, Script, scripts
from dslaunch.rules.settings import Settings

_INIT = ("deepspeed.zero.Init", "deepspeed.runtime.zero.Init", "deepspeed.runtime.zero.partition_parameters.Init")
_TELLS = ("HfDeepSpeedConfig", "TrainingArguments", "Seq2SeqTrainingArguments")
_DRAWS = re.compile(r"(?:torch\.)?nn\.init\.\w+_")
_FILLS = frozenset({"normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "constant_"})


@dataclass(frozen=True)
class _Made:
    """A model whose parameters are parts, from a line on."""

    name: str
    line: int
    function: ast.AST | None
    why: str


@rule(
    "script.sharded-weights", severity="error", raised_by="torch",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/zero/partition_parameters.py 0.19.8, run",
)  # fmt: skip
def sharded(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Weights that are loaded or drawn for parameters that are empty on every rank until they are gathered."""
    config = one_config(plan, files, settings)
    stage3 = config is not None and config.stage == 3
    for script in scripts(files):
        for made in _models(script, stage3=stage3):
            for call in script.every:
                if _follows(script, made, call) and not _gathered(call):
                    yield from _fault(script, made, call)


def _models(script: Script, *, stage3: bool) -> Iterator[_Made]:
    for node in script.nodes:
        if isinstance(node, ast.With) and any(_shards(script, item.context_expr) for item in node.items):
            why = f"zero.Init in line {node.lineno}"
            for statement in node.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                    yield from _targets(script, statement, why, node.end_lineno or node.lineno)
    told = [call for call in script.methods(*_TELLS) if _tells(call)] if stage3 else []
    for call in script.methods("from_pretrained", "from_config") if len(told) == 1 else ():
        outer = next((each for each in call.around if isinstance(each, ast.Assign)), None)
        same = function_of(told[0]) is function_of(call) and told[0].node.lineno < call.node.lineno
        if outer is not None and outer.value is call.node and same and "Model" in call.owner:
            why = f"{told[0].method} in line {told[0].node.lineno}"
            yield from _targets(script, outer, why, call.node.lineno)


def _shards(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or script.name(node.func) not in _INIT:
        return False
    enabled = next((each.value for each in node.keywords if each.arg == "enabled"), None)
    unpacks = any(each.arg is None for each in node.keywords)
    return not unpacks and (enabled is None or script.constant(enabled) is True)


def _tells(call: Call) -> bool:
    return call.method == "HfDeepSpeedConfig" or call.keyword("deepspeed") is not None


def _targets(script: Script, statement: ast.Assign, why: str, line: int) -> Iterator[_Made]:
    call = next((each for each in script.every if each.node is statement.value), None)
    for target in statement.targets if call is not None else ():
        assert call is not None
        if isinstance(target, ast.Name):
            yield _Made(target.id, line, function_of(call), why)


def _follows(script: Script, made: _Made, call: Call) -> bool:
    """Whether a call stands below in the same function, with the name not bound anew in between."""
    if function_of(call) is not made.function or call.node.lineno <= made.line:
        return False
    return not any(made.line < each <= call.node.lineno for each in script.bound_at.get(made.name, ()))


def _gathered(call: Call) -> bool:
    withs = (item for node in call.around if isinstance(node, ast.With) for item in node.items)
    return any("GatheredParameters" in ast.unparse(item.context_expr) for item in withs)


def _fault(script: Script, made: _Made, call: Call) -> Iterator[Hit]:
    """What a call does with a model in parts: itself, or the function of the file that it hands the model to."""
    fix = "Do it before, or under deepspeed.zero.GatheredParameters(..., modifier_rank=0)."
    if _is_part(call.owner, made.name) and call.method == "load_state_dict":
        message = f"each rank holds a part of each parameter, by {made.why}: RuntimeError, size mismatch with [0]."
        yield script.hit(call, message, fix)
    elif _draws(script, call, made.name) or _applies(script, call, made.name):
        message = f"each rank holds a part of each parameter, by {made.why}: what is seen is empty, and stays so."
        yield replace(script.hit(call, message, fix), severity="wrong", raised_by="nobody")
    elif (function := script.functions.get(call.name)) is not None:
        names = [each.arg for each in function.args.args]
        handed = [
            name for name, value in zip(names, call.node.args, strict=False)
            if isinstance(value, ast.Name) and value.id == made.name
        ]  # fmt: skip
        for name in handed:
            if _loads(script, function, name):
                message = (
                    f"{call.name} loads weights, and each rank holds a part of every parameter, by {made.why}: "
                    "RuntimeError, size mismatch with [0]."
                )
                yield script.hit(call, message, fix)


def _is_part(owner: str, name: str) -> bool:
    """Whether `owner` is the model, or one of its modules: not its optimizer's state, nor what it calls."""
    return owner == name or owner.startswith(f"{name}.")


def _draws(script: Script, call: Call, name: str) -> bool:
    """`nn.init.normal_(model.head.weight)` or `model.head.weight.data.normal_()`."""
    if _DRAWS.fullmatch(call.name):
        first = call.node.args[0] if call.node.args else None
        return first is not None and ast.unparse(first).startswith(f"{name}.")
    return call.method in _FILLS and call.owner.startswith(f"{name}.") and call.owner.endswith(".data")


def _applies(script: Script, call: Call, name: str) -> bool:
    """`model.apply(draw)` with a function of the file that draws."""
    given = call.node.args[0] if call.node.args else None
    function = script.functions.get(given.id) if isinstance(given, ast.Name) else None
    if call.method != "apply" or not _is_part(call.owner, name) or function is None:
        return False
    text = ast.unparse(function)
    return bool(_DRAWS.search(text)) and "GatheredParameters" not in text


def _loads(script: Script, function: ast.FunctionDef, name: str) -> bool:
    """Whether a function calls load_state_dict of what it is handed, and neither gathers nor knows of ZeRO."""
    if "GatheredParameters" in ast.unparse(function) or "zero" in ast.unparse(function).lower():
        return False
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"
        and _is_part(ast.unparse(node.func.value), name)
        for node in ast.walk(function)
    )  # fmt: skip




@rule("script.fsdp2-load", severity="error", raised_by="torch", evidence="torch 2.13, run")
def fsdp2_load(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A state of whole tensors that is loaded into a model under fully_shard."""
    for script in scripts(files):
        shards = [call for call in script.called(*FULLY_SHARD) if call.node.args]
        whole = "distribute_tensor" not in script.python.text
        for call in script.methods("load_state_dict") if shards and whole else ():
            made = [each for each in shards if ast.unparse(each.node.args[0]) == call.owner]
            given = possible(script, call.node.args[0], call.around) if call.node.args else []
            read = any(_is_whole(script, each, call) for each in given)
            if read and any(_straight(script, each, call) for each in made):
                message = (
                    f"fully_shard in line {made[0].node.lineno} has made DTensors of the parameters, and the file "
                    "holds whole tensors: RuntimeError."
                )
                fix = (
                    "Load before fully_shard, or call set_model_state_dict(model, state, "
                    "options=StateDictOptions(full_state_dict=True))."
                )
                yield script.hit(call, message, fix)


def _is_whole(script: Script, node: ast.expr, call: Call) -> bool:
    """Whether an expression reads a file of plain tensors, or takes a part of one."""
    while isinstance(node, ast.Subscript):
        found = possible(script, node.value, call.around)
        if len(found) != 1:
            return False
        node = found[0]
    return isinstance(node, ast.Call) and script.name(node.func) in ("torch.load", "safetensors.torch.load_file")


def _straight(script: Script, early: Call, late: Call) -> bool:
    """Whether one stands above the other in one function, with the model not bound anew in between."""
    if function_of(early) is not function_of(late) or early.node.lineno >= late.node.lineno:
        return False
    if any(isinstance(node, ast.If) for node in early.around if node is not function_of(early)):
        return False
    between = range(early.node.lineno + 1, late.node.lineno + 1)
    return not any(each in between for each in script.bound_at.get(late.owner, ()))


@rule(
    "script.offload-backend", severity="error", raised_by="torch",
    evidence="torch 2.13, run on two ranks without a backend for the CPU; pytorch/pytorch#148532",
)  # fmt: skip
def offload_backend(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Gradients that fully_shard keeps on the CPU, clipped over ranks that have no backend for the CPU."""
    for script in scripts(files):
        offloads = [call for call in script.called(*FULLY_SHARD) if _offloads(script, call)]
        groups = script.called(INIT) if offloads else []
        if len(groups) != 1 or script.constant(groups[0].argument("backend", 0)) != "nccl":
            continue
        for call in script.methods("clip_grad_norm_"):
            if call.owner in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
                message = (
                    f"fully_shard in line {offloads[0].node.lineno} keeps the gradients on the CPU, where nccl in "
                    f"line {groups[0].node.lineno} adds nothing up: RuntimeError, No backend type."
                )
                yield script.hit(call, message, 'Write init_process_group("cpu:gloo,cuda:nccl").')


def _offloads(script: Script, call: Call) -> bool:
    given = call.keyword("offload_policy")
    made = possible(script, given, call.around) if given is not None else []
    return bool(made) and all(
        isinstance(each, ast.Call) and script.name(each.func).endswith(".CPUOffloadPolicy") for each in made
    )
