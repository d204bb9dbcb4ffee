"""Training scripts in which two parties scale or divide one loss, or a sharded state is saved by one rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
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
    steps = config.get(_STEPS) if config is not None else None
    for script in scripts(files):
        engines = set() if script.by_framework or (type(steps) is int and steps < 2) else script.engines
        for call in script.methods("backward") if engines or script.accelerators else ():
            told = {str(steps)} if type(steps) is int else _written(script)
            if call.owner not in engines:
                told = _accelerates(script, call.owner)
            asked = (told or call.owner in engines) and call.keyword("scale_wrt_gas") is None
            by = _divisor(script, call) if asked else None
            if by is None or not _counts_passes(files, script, by, told, call):
                continue
            message = (
                f"the loss is divided by {ast.unparse(by)} here and once more in {call.owner}.backward: the "
                "gradients are as many times too small."
            )
            yield script.hit(call, message, f"Hand the undivided loss to {call.owner}.backward.")


_STEPS = "gradient_accumulation_steps"


def _written(script: Script) -> set[str]:
    """What a script writes into a configuration as the passes of a step, unless that is 1."""
    found = [
        value for node in script.nodes if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True) if script.constant(key) == _STEPS
    ] + [
        node.value for node in script.nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        and script.constant(node.targets[0].slice) == _STEPS
    ]  # fmt: skip
    return {ast.unparse(value) for value in found if script.constant(value) not in (1, "auto")}


def _accelerates(script: Script, name: str) -> set[str]:
    """What the Accelerator of this name is to accumulate, as it is written; empty where that is nothing."""
    made = script.called(*ACCELERATOR) if name in script.accelerators else []
    given = made[0].keyword(_STEPS) if len(made) == 1 else None
    return set() if given is None or script.constant(given) == 1 else {ast.unparse(given)}


def _divisor(script: Script, call: Call) -> ast.expr | None:
    """By what the loss is divided that is handed to a call, there or in the last line that binds its name."""
    given = call.node.args[0] if call.node.args else None
    if isinstance(given, ast.Name):
        last, scope = None, function_of(call) or script.python.tree
        for node in ast.walk(scope):
            if not isinstance(node, ast.Assign | ast.AugAssign) or node.lineno >= call.node.lineno:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == given.id and (last is None or last.lineno < node.lineno):
                last = node
        if last is None:
            return None
        divided = isinstance(last, ast.AugAssign) and isinstance(last.op, ast.Div)
        by = last.value if divided else _divided_by(last.value)
        return by if by is not None and not _elsewhere(scope, last, call, by) else None
    return _divided_by(given)


def _divided_by(given: ast.expr | None) -> ast.expr | None:
    """The divisor of `loss / n`, `loss.div(n)` and `loss * (1 / n)`."""
    if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute):
        return given.args[0] if given.func.attr in ("div", "div_", "true_divide") and given.args else None
    if not isinstance(given, ast.BinOp):
        return None
    share = given.right
    if isinstance(given.op, ast.Mult) and isinstance(share, ast.BinOp) and isinstance(share.op, ast.Div):
        return share.right if ast.unparse(share.left) in ("1", "1.0") else None
    return share if isinstance(given.op, ast.Div) else None


def _elsewhere(scope: ast.AST, divides: ast.stmt, call: Call, by: ast.expr) -> bool:
    """Whether a condition stands around the division alone, other than whether there are several passes."""
    around = (node for node in ast.walk(scope) if isinstance(node, ast.If))
    return any(
        any(each is divides for each in ast.walk(node)) and node not in call.around
        and ast.unparse(by) not in ast.unparse(node.test)
        for node in around
    )  # fmt: skip


def _counts_passes(files: FileSet, script: Script, by: ast.expr, told: set[str], call: Call) -> bool:
    """Whether a divisor is the number of accumulated passes: the same words or number, or read from the engine."""
    held = script.bound(by) or by
    texts, number = {ast.unparse(by), ast.unparse(held)}, value_of(files, script, by, call.around)
    if texts & told or (number is not None and str(number) in told):
        return True
    if call.owner not in script.engines:
        return False
    key = held.slice if isinstance(held, ast.Subscript) else None
    if isinstance(held, ast.Call) and isinstance(held.func, ast.Attribute) and held.func.attr == "get":
        key = held.args[0] if held.args else None
    own = rf"{re.escape(call.owner)}\.{_STEPS}(?:\(\))?"
    return script.constant(key) == _STEPS or any(re.fullmatch(own, text) for text in texts)


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
