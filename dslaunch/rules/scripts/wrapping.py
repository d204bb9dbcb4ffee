"""Training scripts around DDP and accelerate: what is called before what, and by whom a step is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.tree import ACCELERATOR, DDP, Call, Script, scripts
from dslaunch.rules.settings import Settings

_RAN = "torch 2.13, run"
_INIT = ("torch.distributed.init_process_group", "deepspeed.init_distributed")
_NEEDS_RANKS = frozenset({
    "torch.distributed.get_rank", "torch.distributed.get_world_size", "torch.distributed.barrier",
    "torch.distributed.all_reduce", "torch.distributed.broadcast",
})  # fmt: skip
_SAMPLER = "torch.utils.data.DistributedSampler"
_OF_MODELS = frozenset({
    "generate", "save_pretrained", "push_to_hub", "resize_token_embeddings", "gradient_checkpointing_enable",
    "get_input_embeddings", "enable_input_require_grads",
})  # fmt: skip
"""Methods of transformers' models."""
_TELLS_WRAPPED = re.compile(r"num_processes|world_size|distributed|hasattr|isinstance|DDP", re.IGNORECASE)
_MOST = 20
"""Calls of one kind that are looked at."""


def straight_before(script: Script, early: Call, late: Call, name: str) -> bool:
    """Whether one stands above the other in the same function, outside of branches, with `name` bound no more."""
    if function_of(early) is not function_of(late) or early.node.lineno >= late.node.lineno:
        return False
    if in_branch(early) or in_branch(late):
        return False
    between = range(early.node.lineno + 1, late.node.lineno)
    return not any(each in between for each in script.bound_at.get(name, ()))


def in_branch(call: Call) -> bool:
    """Whether something but `if __name__ == "__main__":` decides that the call is reached."""
    for node in call.around:
        if isinstance(node, ast.Try | ast.For | ast.While | ast.IfExp | ast.BoolOp | ast.Lambda):
            return True
    return any("__name__" not in ast.unparse(node.test) for node, _ in guards(call))


@rule("script.sampler-shuffle", severity="error", raised_by="torch", evidence=_RAN)
def shuffled(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DataLoader with a sampler that is to shuffle as well."""
    for script in scripts(files):
        for call in script.called("torch.utils.data.DataLoader"):
            shuffle, given = call.keyword("shuffle"), script.bound(call.keyword("sampler"))
            is_true = isinstance(shuffle, ast.Constant) and shuffle.value is True
            if is_true and isinstance(given, ast.Call) and not call.unpacks:
                message = "shuffle=True beside a sampler: ValueError, they exclude each other."
                yield script.hit(call, message, "Leave shuffle out: DistributedSampler shuffles by itself.")


@rule("script.before-init", severity="error", raised_by="torch", evidence=_RAN)
def before_init(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Ranks asked for above the line that sets them up."""
    for script in scripts(files):
        starts = script.called(*_INIT)[:_MOST]
        for call in script.calls:
            if call.name not in _NEEDS_RANKS and not _asks_ranks(call):
                continue
            late = [each for each in starts if straight_before(script, call, each, "")]
            if late and not any(each.node.lineno <= call.node.lineno for each in starts):
                message = (
                    f"{call.method} before {late[0].method} in line {late[0].node.lineno}: ValueError, "
                    "Default process group has not been initialized."
                )
                yield script.hit(call, message, f"Call {late[0].method} first.")


def _asks_ranks(call: Call) -> bool:
    """Whether a DistributedSampler takes number and rank from the process group."""
    told = call.argument("num_replicas", 1) is not None and call.argument("rank", 2) is not None
    return call.name == _SAMPLER and not told and not call.unpacks


@rule("script.wrapped-attribute", severity="error", raised_by="torch", evidence=_RAN)
def wrapped(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A method of transformers' models called on DDP, which doesn't hand it on."""
    for script in scripts(files):
        calls = script.methods(*_OF_MODELS)[:_MOST]
        for node, name, inner in _wrapped_names(script, files) if calls else ():
            top = node in script.python.tree.body
            for call in calls:
                if call.owner == name and _sees(script, call, node, name, top=top) and not _asks_first(call):
                    message = (
                        f"{name} is DistributedDataParallel, which has no {call.method}: AttributeError."
                    )
                    yield script.hit(call, message, f"Call {inner}.{call.method}.")


def _asks_first(call: Call) -> bool:
    """Whether a condition around a call tells a wrapped model from a bare one, or several ranks from one."""
    return any(_TELLS_WRAPPED.search(ast.unparse(node.test)) for node, _ in guards(call))


def _wrapped_names(script: Script, files: FileSet) -> Iterator[tuple[ast.Assign, str, str]]:
    """Assignments that wrap a model in DDP, the name that holds it then, and how to write the model inside."""
    told = [str(file.get("distributed_type")).upper() for file in files.of("accelerate")]
    by_accelerate = set(told) == {"MULTI_GPU"} and script.methods("backward")
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        target, call = node.targets[0], node.value
        if script.name(call.func) == DDP and isinstance(target, ast.Name):
            yield node, target.id, f"{target.id}.module"
        elif by_accelerate and _method(call) == "prepare" and _owner(call) in script.accelerators:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            for name, given in zip(targets, call.args, strict=False):
                if isinstance(name, ast.Name) and isinstance(given, ast.Name):
                    yield node, name.id, f"{_owner(call)}.unwrap_model({name.id})"


def _sees(script: Script, call: Call, made: ast.Assign, name: str, *, top: bool) -> bool:
    """Whether the call is below the wrapping, in its function, with the name not bound again in between."""
    function = function_of(call)
    if call.node.lineno <= made.lineno or (function is None) is not top:
        return False
    if function is not None and made not in list(ast.walk(function)):
        return False
    return not any(made.lineno < each <= call.node.lineno for each in script.bound_at.get(name, ()))


@rule(
    "script.clip-scaled",
    severity="wrong",
    raised_by="nobody",
    evidence="PyTorch 2.13 documentation: amp examples",
)
def clip_scaled(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Gradients clipped while GradScaler's factor is still in them."""
    for script in scripts(files):
        yield from _clipped_by_torch(script, files)
        for function in _bodies(script) if not script.methods("unscale_") else ():
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            scaled = {_scaler(node): node.lineno for node in calls if _scaler(node)}
            steps = [node.lineno for node in calls if _method(node) == "step" and _owner(node) in scaled]
            for node in calls if scaled and steps else ():
                if _method(node) in _CLIPS and min(scaled.values()) < node.lineno < max(steps):
                    message = (
                        "the gradients still hold the loss scale, 65536 at first: all of them are cut down."
                    )
                    fix = "Call scaler.unscale_(optimizer) before it."
                    yield Hit(script.path, script.python.at(node), message, fix)


def _clipped_by_torch(script: Script, files: FileSet) -> Iterator[Hit]:
    """torch's clipping where accelerate scales the loss under fp16, and nothing has it taken out before."""
    names = script.accelerators
    if not names or any(call.owner in names for call in script.methods("unscale_gradients", *_CLIPS)):
        return
    made, told = script.called(*ACCELERATOR), files.of("accelerate")
    scaled = any(script.constant(call.keyword("mixed_precision")) == "fp16" for call in made)
    by_file = any(file.get("mixed_precision") == "fp16" for file in told)
    engine = any(str(file.get("distributed_type")).upper() == "DEEPSPEED" for file in told)
    backwards = [call for call in script.methods("backward") if call.owner in names]
    for call in script.calls if backwards and (scaled or by_file) and not engine else ():
        if call.owner.startswith("torch.nn.utils") and call.method in _CLIPS:
            name = backwards[0].owner
            message = (
                "accelerate's loss scale, 65536 at first, is still in the gradients: all of them are cut down, "
                "and its step divides them by the scale besides."
            )
            yield script.hit(call, message, f"Call {name}.{call.method}.")


_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _bodies(script: Script) -> Iterator[ast.AST]:
    """Each function, or the whole file where it has none around its loop."""
    functions: list[ast.AST] = [
        node for node in script.nodes if isinstance(node, ast.FunctionDef)
    ]
    yield from functions or (script.python.tree,)


def _scaler(call: ast.Call) -> str:
    """`scaler` of `scaler.scale(loss).backward()`; empty for any other call."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" else None
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "scale":
        return ast.unparse(inner.func.value)
    return ""


@rule(
    "script.accelerate-backward",
    severity="wrong",
    raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py backward 1.15.0",
)
def backward(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """loss.backward() where accelerate was to scale, divide and hand the gradients over."""
    for script in scripts(files):
        names = script.accelerators
        if not names or not any(call.owner in names for call in script.methods("prepare")):
            continue
        if any(call.owner in names for call in script.methods("backward")):
            continue
        for call in script.methods("backward"):
            if call.owner.endswith("loss"):
                name = sorted(names)[0]
                message = (
                    f"{call.owner}.backward() passes accelerate by: no loss scale under fp16, and no division for "
                    "accumulation."
                )
                found = script.hit(call, message, f"Write {name}.backward({call.owner}).")
                if _halves(script, files):
                    message = (
                        f"{call.owner}.backward() under fp16: the optimizer steps by a GradScaler that scaled "
                        "nothing, AssertionError in the first step."
                    )
                    yield replace(found, message=message, severity="error", raised_by="accelerate")
                else:
                    yield found if _divides(script) else replace(found, severity="info")


def _halves(script: Script, files: FileSet) -> bool:
    """Whether the optimizer that is stepped is accelerate's, and scales the loss by script or configuration."""
    told = files.of("accelerate")
    prepared = {
        each.id for call in script.methods("prepare") if call.owner in script.accelerators
        for each in ast.walk(call.node) if isinstance(each, ast.Name)
    }  # fmt: skip
    if not any(call.owner in prepared for call in script.methods("step")):
        return False
    if script.methods("GradScaler") or any(each.get("distributed_type") not in _SCALED for each in told):
        return False
    given = [script.constant(call.keyword("mixed_precision")) for call in script.called(*ACCELERATOR)]
    by_file = bool(told) and all(file.get("mixed_precision") == "fp16" for file in told)
    return given == ["fp16"] or (by_file and given == [None] and not _tells(script))


def _tells(script: Script) -> bool:
    """Whether a script gives its Accelerator a type, or arguments that aren't told."""
    made = script.called(*ACCELERATOR)
    return any(call.unpacks or call.keyword("mixed_precision") is not None for call in made)


def _divides(script: Script) -> bool:
    """Whether an Accelerator is told to divide the loss; its configuration may tell it too."""
    made = script.called(*ACCELERATOR)
    return any(call.keyword("gradient_accumulation_steps") is not None for call in made)


_SCALED = ("MULTI_GPU", "NO", "FSDP")


@rule(
    "script.accelerate-prepare",
    severity="wrong",
    raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py prepare_data_loader 1.15.0",
)
def unprepared(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DataLoader that trains and that accelerate never gets: every process reads all the data."""
    for script in scripts(files):
        names = script.accelerators
        given = [call for call in script.methods("prepare", "prepare_data_loader") if call.owner in names]
        if not given or any(call.unpacks or _starred(call) for call in given):
            continue
        told = {ast.unparse(each) for call in given for each in call.node.args}
        for loop in (node for node in script.nodes if isinstance(node, ast.For)):
            loader = loop.iter.id if isinstance(loop.iter, ast.Name) else ""
            made = script.bound(loop.iter) if loader and loader not in told else None
            trains = any(
                isinstance(each, ast.Attribute) and each.attr == "backward" for each in ast.walk(loop)
            )
            if (
                trains
                and isinstance(made, ast.Call)
                and script.name(made.func) == "torch.utils.data.DataLoader"
            ):
                if any(keyword.arg in ("sampler", "batch_sampler") for keyword in made.keywords):
                    continue
                call = next(each for each in script.calls if each.node is made)
                message = f"{loader} isn't among what prepare gets: every process trains on all of the data."
                yield script.hit(
                    call, message, f"Add {loader} to prepare, and take it from what that returns."
                )


def _starred(call: Call) -> bool:
    return any(isinstance(each, ast.Starred) for each in call.node.args)
