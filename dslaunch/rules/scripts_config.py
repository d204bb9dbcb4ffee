"""A training script against the DeepSpeed JSON and the command line beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.config import configs, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts_tree import Script, scripts
from dslaunch.rules.settings import Settings

_CONFIG, _STEPS = "--deepspeed_config", "gradient_accumulation_steps"


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
    "accelerate.optimizer", severity="error", raised_by="accelerate",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py _prepare_deepspeed 1.15.0, run",
)  # fmt: skip
def prepared(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """An optimizer or scheduler that the script hands to accelerate, and the DeepSpeed JSON holds as well."""
    config = one_config(plan, files, settings)
    for script in scripts(files) if config is not None else ():
        if not script.called("accelerate.Accelerator"):
            continue
        for call in script.methods("prepare"):
            made = [script.bound(argument) for argument in call.node.args]
            names = [script.name(each.func) for each in made if isinstance(each, ast.Call)]
            for section, own, dummy in _SECTIONS:
                assert config is not None
                held = config.has(section)
                if held and any(name.startswith(own) and "lr_scheduler" not in name[len(own) :] for name in names):
                    message = f"{section} is made here, and stands in the DeepSpeed JSON: ValueError."
                    yield script.hit(call, message, f"Make accelerate.utils.{dummy}, or drop the section.")
                if not held and section == "optimizer" and any(name.endswith(f".{dummy}") for name in names):
                    message = f"{dummy} stands for a section of the DeepSpeed JSON that isn't there: ValueError."
                    yield script.hit(call, message, f'Add "{section}" to the JSON, or make a real one.')


_SECTIONS = (
    ("optimizer", "torch.optim.", "DummyOptim"),
    ("scheduler", "torch.optim.lr_scheduler.", "DummyScheduler"),
)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _given(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def _cleared(script: Script) -> bool:
    """Whether the script itself takes the name out of its arguments, as Megatron-DeepSpeed does."""
    stored = (node for node in ast.walk(script.python.tree) if isinstance(node, ast.Attribute))
    return any(node.attr == "deepspeed_config" and not isinstance(node.ctx, ast.Load) for node in stored)
