"""Training scripts that do on one rank, by a function of their own, what all ranks have to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.branches import others_may_join
from dslaunch.rules.scripts.guards import (
    COLLECTIVES,
    OF_ACCELERATE,
    OF_CHECKPOINTS,
    function_of,
    of_a_group,
    one_rank_guard,
)
from dslaunch.rules.scripts.torch import is_sharded
from dslaunch.rules.scripts.tree import DDP, FULLY_SHARD, Call, Script, scripts
from dslaunch.rules.settings import Settings

_Kind = Literal["accelerator", "buffers", "engine", "fsdp", "fsdp2", "plain", "zero3"]
"""`plain` is an Accelerator that isn't seen to shard the model."""
_FORWARD = ("buffers", "fsdp", "fsdp2", "zero3")
"""Those in whose forward pass ranks meet."""
_DEPTH = 2
"""Functions that are looked into, one called by the other."""
_STATES = (
    *OF_CHECKPOINTS,
    "torch.distributed.checkpoint.state_dict.get_model_state_dict",
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
    "torch.distributed.checkpoint.state_dict.get_state_dict",
)  # fmt: skip
_OF_ENGINES = ("save_checkpoint", "load_checkpoint", "train_batch", "eval_batch", "backward", "step")
_TELLS_APART = re.compile(
    r"\b(?:local_|global_)?rank\b|get_rank\(|is_main|is_master|main_process|process_index"
)
_BUFFERS = re.compile(r"BatchNorm|resnet\d+|efficientnet|mobilenet|densenet\d+")
"""Models that hold running means, which DDP sends from the first rank in each forward."""


@rule(
    "script.helper-under-rank", severity="hang", raised_by="nobody", evidence="torch 2.13, run on two ranks"
)
def helper(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A function that needs all ranks, or the forward of a wrapped model, on one rank alone."""
    config = one_config(plan, files, settings)
    for script in scripts(files):
        held = _held(script, zero3=config is not None and config.stage == 3)
        if (
            not is_sharded(plan, files, settings)
            and "FullyShardedDataParallelPlugin" not in script.python.text
        ):
            held |= {name: "plain" for name, kind in held.items() if kind == "accelerator"}
        guarded = [(call, told) for call in script.calls if (told := one_rank_guard(call)) is not None]
        reached = {(call.method, function_of(call), told) for call, told in guarded}
        for call, told in guarded:
            if (call.method, function_of(call), not told) in reached:
                continue
            kind = held.get(call.name) or (held.get(call.owner) if call.method == "generate" else None)
            if kind == "zero3":
                continue  # script.collective-under-rank tells it
            needs = f"{call.name}()" if kind in _FORWARD else _needs(script, call, held, _DEPTH)
            if needs and not others_may_join(script, call):
                message = f"{needs} needs every rank, and only some get here: the others wait for ever."
                fix = "Call it on all ranks, and write or print on one."
                if kind == "buffers":
                    fix = f"Call it on all ranks, or {call.name}.module on one."
                yield script.hit(call, message, fix)


def _held(script: Script, *, zero3: bool) -> dict[str, _Kind]:
    """What the names of a script hold that ranks share."""
    held: dict[str, _Kind] = dict.fromkeys(script.sharded, "fsdp")
    held |= dict.fromkeys(script.engines, "zero3" if zero3 else "engine")
    held |= dict.fromkeys(script.accelerators, "accelerator")
    held |= {ast.unparse(call.node.args[0]): "fsdp2" for call in script.called(*FULLY_SHARD) if call.node.args}
    if _BUFFERS.search(script.python.text):
        for call in script.called(DDP):
            around = call.around[0]
            if (
                isinstance(around, ast.Assign)
                and not call.unpacks
                and call.keyword("broadcast_buffers") is None
            ):
                held[ast.unparse(around.targets[0])] = "buffers"
    for name in script.bound_at:
        bound = script.bound(ast.Name(name, ast.Load()))
        if isinstance(bound, ast.Name) and bound.id in held:
            held.setdefault(name, held[bound.id])
    return held


def _needs(script: Script, call: Call, held: Mapping[str, _Kind], depth: int) -> str:
    """What the function of the file that is called does with all ranks; empty where nothing is seen."""
    function = script.functions.get(call.name) or _method(script, call)
    if function is None or not depth or call.unpacks:
        return ""
    names = [each.arg for each in function.args.args if each.arg != "self"]
    given = dict(zip(names, call.node.args, strict=False))
    given |= {each.arg: each.value for each in call.node.keywords if each.arg}
    inner = {name: held[text] for name, each in given.items() if (text := ast.unparse(each)) in held}
    inner |= {name: kind for name, kind in held.items() if name not in names}
    if _TELLS_APART.search(ast.unparse(function).partition("\n")[2]):
        return ""  # it tells the ranks apart itself
    for each in script.calls_of.get(function, ()):
        if found := _is_shared(each, inner) or _needs(script, each, inner, depth - 1):
            return found
    return ""


def _method(script: Script, call: Call) -> ast.FunctionDef | None:
    """The method of a class of the file, of an object that is made of it in one place."""
    around = next((node for node in call.around if isinstance(node, ast.ClassDef)), None)
    made = script.bound(ast.Name(call.owner, ast.Load())) if call.owner.isidentifier() else None
    name = script.name(made.func) if isinstance(made, ast.Call) else ""
    for node in script.nodes if name or (around is not None and call.owner == "self") else ():
        if isinstance(node, ast.ClassDef) and (node is around if call.owner == "self" else node.name == name):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            return next((each for each in methods if each.name == call.method), None)
    return None


def _is_shared(call: Call, held: Mapping[str, _Kind]) -> str:
    kind, method = held.get(call.owner), call.method
    shared = (
        (kind == "fsdp" and method in ("state_dict", "generate", "clip_grad_norm_"))
        or (kind in ("engine", "zero3") and method in _OF_ENGINES)
        or (kind in ("accelerator", "plain") and method in OF_ACCELERATE)
        or (kind == "accelerator" and method in ("save_state", "get_state_dict"))
        or held.get(call.name) in _FORWARD
        or (call.owner == "torch.distributed" and method in COLLECTIVES and not of_a_group(call))
        or (call.name in _STATES and call.keyword("no_dist") is None and call.keyword("process_group") is None)
    )
    return f"{ast.unparse(call.node.func)}() in line {call.node.lineno}" if shared else ""
