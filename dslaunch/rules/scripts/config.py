"""A training script against the DeepSpeed JSON and the command line beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import configs, one_config
from dslaunch.rules.deepspeed.keys import is_slip
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_CONFIG, _STEPS = "--deepspeed_config", "gradient_accumulation_steps"
_MICRO = "train_micro_batch_size_per_gpu"


@rule(
    "script.two-configs", severity="error", raised_by="deepspeed.initialize", since="0.16.9",
    evidence="deepspeedai/DeepSpeed:deepspeed/__init__.py initialize 0.16.9 and 0.19.8",
)  # fmt: skip
def two_configs(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """deepspeed.initialize(args=..., config=...) of a script that is started with --deepspeed_config."""
    lines = (line for _, line in files.launches() if line.arguments.has(_CONFIG))
    started = {_name(line.script.text) for line in lines if line.script}
    for script in scripts(files):
        for call in script.called("deepspeed.initialize") if _name(script.path) in started else ():
            config = call.keyword("config") or call.keyword("config_params")
            if _given(call.keyword("args")) and _given(config) and not _cleared(script):
                message = (
                    f"args holds {_CONFIG} of the command line, and config= is given too: AssertionError, "
                    "DeepSpeed takes one of them."
                )
                yield script.hit(call, message, f"Drop config=, or {_CONFIG}.")


@rule(
    "script.accumulation", severity="wrong", raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py _prepare_deepspeed 1.15.0",
)  # fmt: skip
def accumulation(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Accelerator(gradient_accumulation_steps=N) beside a DeepSpeed JSON with another number."""
    held = {config.number(_STEPS) for config in configs(plan, files, settings)} - {None}
    for script in scripts(files) if len(held) == 1 else ():
        for call in script.called("accelerate.Accelerator"):
            given = call.keyword(_STEPS)
            if isinstance(given, ast.Constant) and given.value not in held:
                (steps,) = held
                message = (
                    f"{_STEPS} is {given.value!r} here, and {steps:g} in the DeepSpeed JSON, which accelerate "
                    "takes: it only warns, and steps and learning rate follow the JSON."
                )
                yield script.hit(call, message, f'Write "{_STEPS}": "auto" in the JSON, or the same number.')


@rule(
    "accelerate.clipping", severity="info", raised_by="nobody", since="0.19.3",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/constants.py 0.19.8; accelerate 1.15.0",
)  # fmt: skip
def clipping(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Gradients that DeepSpeed clips by its default, where a script with accelerate doesn't ask for it."""
    config = one_config(plan, files, settings)
    if config is None or config.has("gradient_clipping") or config.optimizer:
        return
    for script in scripts(files):
        clips = script.methods("clip_grad_norm_", "clip_grad_value_")
        if script.called("accelerate.Accelerator") and script.methods("prepare") and not clips:
            message = "gradient_clipping isn't given: DeepSpeed clips at 1.0 since 0.19.3, and the script doesn't."
            yield config.hit("gradient_clipping", message, "Write 0.0 to leave them alone, or 1.0 if it is meant.")


@rule(
    "launcher.file", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/config.py, launcher/runner.py fetch_hostfile 0.19.8, run",
)  # fmt: skip
def named_file(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DeepSpeed JSON or hostfile that a command names with a slip of the pen, beside the one that is meant."""
    for file, line in files.launches():
        for flag in (_CONFIG, "--deepspeed-config", "--deepspeed"):
            for named, near in _slips(line.arguments, flag, files.of("deepspeed_json")):
                message = f"no file {named} is here; the one that is, is {near}: ValueError at start-up."
                yield Hit(file.name, line.arguments.position(flag), message, f"Write {near}.")
        launcher = line.launcher("deepspeed")
        for named, near in _slips(launcher.options, "--hostfile", files.of("hostfile")) if launcher else ():
            assert launcher is not None
            message = f"no file {named} is here; the one that is, is {near}: the job starts on this machine alone."
            at = launcher.options.position("--hostfile")
            yield Hit(file.name, at, message, f"Write {near}.", severity="wrong", raised_by="nobody")


def _slips(options: Arguments, flag: str, present: tuple[File, ...]) -> Iterator[tuple[str, str]]:
    """A file's name as it is written, and the one that is there and may be meant."""
    names = sorted({_name(file.name) for file in present})
    named = _name(options.value(flag) or "")
    near = [name for name in names if is_slip(named, name) and not _other_number(named, name)]
    if named and named not in names and len(near) == 1:
        yield named, near[0]


def _other_number(named: str, present: str) -> bool:
    """Whether two names differ in their digits: ds_zero2.json and ds_zero3.json are two files."""
    return re.findall(r"\d", named) != re.findall(r"\d", present)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _given(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def _cleared(script: Script) -> bool:
    """Whether the script itself takes the name out of its arguments, as Megatron-DeepSpeed does."""
    stored = (node for node in script.nodes if isinstance(node, ast.Attribute))
    return any(node.attr == "deepspeed_config" and not isinstance(node.ctx, ast.Load) for node in stored)
