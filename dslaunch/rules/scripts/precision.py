"""The type that a training script gives its model, against the precision of the DeepSpeed JSON beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Call, Script, scripts
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
