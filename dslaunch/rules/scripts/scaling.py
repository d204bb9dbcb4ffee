"""Training scripts in which two parties scale or divide one loss, or a sharded state is saved by one rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, one_rank_guard
from dslaunch.rules.scripts.tree import ACCELERATOR, FULLY_SHARD, Call, Script, scripts
from dslaunch.rules.settings import Settings

_ENGINE = "deepspeedai/DeepSpeed:deepspeed/runtime/engine.py 0.19.8"
_STATE = "torch.distributed.checkpoint.state_dict.get_model_state_dict"
_PUT_TOGETHER = re.compile(r"full_tensor|StateDictOptions|full_state_dict|redistribute")


@rule(
    "script.engine-scaler", severity="wrong", raised_by="nobody", since="0.16.9",
    evidence=f"{_ENGINE} backward, run",
)  # fmt: skip
def engine_scaler(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch's GradScaler beside an engine, which scales under fp16 by itself and never takes this factor out."""
    fix = 'Drop GradScaler: "fp16" in the DeepSpeed JSON scales the loss, and bf16 needs no scale.'
    for script in scripts(files):
        scalers = _scalers(script) if script.engines and not script.by_framework else set()
        for call in script.calls if scalers else ():
            given = script.bound(call.node.args[0]) if call.node.args else None
            if call.method == "backward" and call.owner in script.engines and _scales(given, scalers):
                message = (
                    "the loss holds GradScaler's factor, 65536 at first, and engine.step() leaves it in the "
                    "gradients: they are as many times too large, or all of them are clipped."
                )
                yield script.hit(call, message, fix)
            elif call.method == "step" and call.owner in scalers and given is not None and _is_of(script, given):
                message = (
                    "GradScaler steps an engine's optimizer past the engine: ranks aren't reduced, and under "
                    "ZeRO it raises AssertionError, No inf checks were recorded."
                )
                yield script.hit(call, message, fix)


def _scalers(script: Script) -> set[str]:
    """Names that hold a GradScaler of torch's."""
    made = {call.name for call in script.calls if re.fullmatch(r"torch\.(?:cuda\.)?amp\.GradScaler", call.name)}
    return {name for each in made for name in script.assigned(each)}


def _scales(node: ast.expr | None, scalers: set[str]) -> bool:
    """Whether an expression is `scaler.scale(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "scale" and ast.unparse(node.func.value) in scalers


def _is_of(script: Script, given: ast.expr) -> bool:
    text = ast.unparse(given)
    return text in script.engines or text in {f"{name}.optimizer" for name in script.engines}


@rule(
    "script.divided-twice", severity="wrong", raised_by="nobody",
    evidence=f"{_ENGINE} backward, run; huggingface/accelerate:src/accelerate/accelerator.py backward 1.15.0, run",
)  # fmt: skip
def divided_twice(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A loss that the script divides by the accumulated passes, although the engine or accelerate does."""
    config = one_config(plan, files, settings)
    steps = config.get("gradient_accumulation_steps") if config is not None else None
    for script in scripts(files):
        by_engine = {} if script.by_framework or type(steps) is not int or steps < 2 else dict.fromkeys(
            script.engines, str(steps)
        )  # fmt: skip
        for call in script.methods("backward") if by_engine or script.accelerators else ():
            told = by_engine.get(call.owner) or _accelerates(script, call.owner)
            by = _divisor(script, call) if told and call.keyword("scale_wrt_gas") is None else None
            if by is None or not _counts_passes(script, by, told, call.owner):
                continue
            message = (
                f"the loss is divided by {ast.unparse(by)} here and once more in {call.owner}.backward: the "
                "gradients are as many times too small."
            )
            yield script.hit(call, message, f"Hand the undivided loss to {call.owner}.backward.")


def _accelerates(script: Script, name: str) -> str:
    """What the Accelerator of this name is to accumulate, as it is written; empty where that is nothing."""
    made = script.called(*ACCELERATOR) if name in script.accelerators else []
    given = made[0].keyword("gradient_accumulation_steps") if len(made) == 1 else None
    return "" if given is None or script.constant(given) == 1 else ast.unparse(given)


def _divisor(script: Script, call: Call) -> ast.expr | None:
    """By what the loss is divided that is handed to a call, there or in the last line that binds its name."""
    given = call.node.args[0] if call.node.args else None
    if isinstance(given, ast.Name):
        last = None
        for node in ast.walk(function_of(call) or script.python.tree):
            if not isinstance(node, ast.Assign | ast.AugAssign) or node.lineno >= call.node.lineno:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == given.id and (last is None or last.lineno < node.lineno):
                last = node
        if isinstance(last, ast.AugAssign):
            return last.value if isinstance(last.op, ast.Div) else None
        given = last.value if last is not None else None
    return given.right if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Div) else None


def _counts_passes(script: Script, by: ast.expr, told: str, owner: str) -> bool:
    """Whether a divisor is the number of accumulated passes: the same words or number, or the owner's own."""
    text, number = ast.unparse(by), script.constant(by)
    if text == told or (number is not None and str(number) == told):
        return True
    return re.fullmatch(rf"{re.escape(owner)}\.gradient_accumulation_steps(?:\(\))?", text) is not None


@rule("script.fsdp2-state", severity="wrong", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def fsdp2_state(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The state of a model under fully_shard, saved by one rank as it stands: the file holds its shards alone."""
    for script in scripts(files):
        models = {ast.unparse(call.node.args[0]) for call in script.called(*FULLY_SHARD) if call.node.args}
        if not models or _PUT_TOGETHER.search(script.python.text):
            continue
        for call in script.called("torch.save"):
            given = call.argument("obj", 0)
            if one_rank_guard(call) and any(
                _is_state(script, each, models) for each in ast.walk(given or call.node)
            ):
                message = (
                    "the tensors are DTensors: the file holds this rank's shards alone, and a plain model "
                    "refuses them when it loads."
                )
                fix = (
                    "On all ranks: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                    "cpu_offload=True)); then save on one."
                )
                yield script.hit(call, message, fix)


def _is_state(script: Script, node: ast.AST, models: set[str]) -> bool:
    """Whether it is the state of a sharded model, there or by the name it is bound to."""
    found = script.bound(node) if isinstance(node, ast.Name) else node
    if not isinstance(found, ast.Call):
        return False
    if script.name(found.func) == _STATE:
        return bool(found.args) and ast.unparse(found.args[0]) in models
    func = found.func
    return isinstance(func, ast.Attribute) and func.attr == "state_dict" and ast.unparse(func.value) in models
