"""A DeepSpeed JSON key by key against the Trainer's arguments, as the Trainer compares them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, TypeGuard

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import START
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config, configs
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.huggingface.trainer import Argument, runs_reading
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.launched import started
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_SOURCE = (
    "huggingface/transformers:src/transformers/integrations/deepspeed.py trainer_config_process, "
    "trainer_config_finalize 5.24.0"
)
_MATCHED: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys that must be auto, or equal to this argument."""
_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
    "learning_rate": 5e-5, "adam_epsilon": 1e-8, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "fp16": False, "bf16": False, "warmup_steps": 0,
}  # fmt: skip
"""TrainingArguments' own, 4.40.2 to 5.24.0."""
_OTHERS_TOO = frozenset({"learning_rate", "fp16", "bf16"})
"""Of which TRL's classes of arguments have defaults of their own."""
_PLAIN = frozenset({"TrainingArguments", "Seq2SeqTrainingArguments"})
_EFFECT = "the Trainer raises ValueError, after the model was loaded."
_AUTO = 'Write "auto", or the same value.'


@rule(
    "huggingface.mismatch",
    severity="error",
    raised_by="transformers",
    evidence=f"{_SOURCE}, run; transformers#29348",
)
def mismatch(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A value that differs from the Trainer's argument for the same thing."""
    for given, read in runs_reading(files, configs(plan, files, settings)):
        if not given or not read:
            continue
        told = _with_warmup(_with_evaluation(given | _defaults(files, given)))
        alone = _with_warmup(_with_evaluation(given)) if _is_unread(files, given) else told
        for config in read:
            sure = {each.message for each in _differing(config, given, alone, files)}
            for found in _differing(config, given, told, files):
                yield found if found.message in sure else replace(found, severity="info")


def _is_unread(files: FileSet, given: Mapping[str, Argument]) -> bool:
    """Whether a command hands the JSON to a script that isn't here, whose arguments may have other defaults."""
    named = given["deepspeed"].name if "deepspeed" in given else ""
    lines = [command for file, command in files.launches() if file.name == named]
    return bool(lines) and not all(started(files, command) for command in lines)


def _differing(
    config: Config, given: Mapping[str, Argument], told: Mapping[str, Argument], files: FileSet
) -> Iterator[Hit]:
    for key, name in _MATCHED.items():
        value, argument = config.get(key), told.get(name)
        if argument is None or value is None or value == "auto" or _is_unset(name, argument.value, value):
            continue
        if value != argument.value:
            found = _differs(config, key, name, argument, files, sure=_excluded(name, given))
            yield _where_it_trains(found) if _trains_by_itself(given, files) else found
    yield from _betas(config, told)
    yield from _batch(config, told)


_OF_OWN_LOOPS = frozenset({"clip_grad_norm", "clip_grad_value", "clip_loss_value", "grad_clip", "warmup"})
"""What programs with a loop of their own call what the Trainer calls max_grad_norm and warmup_steps."""


def _trains_by_itself(given: Mapping[str, Argument], files: FileSet) -> bool:
    """Whether a program seems to hand the JSON that its arguments name to an engine of its own."""
    engines = (call.argument("config", 10) for script in scripts(files) for call in script.deepspeed)
    handed = any(isinstance(each, ast.Attribute) and each.attr == "deepspeed" for each in engines)
    return handed or not _OF_OWN_LOOPS.isdisjoint(given)


def _where_it_trains(found: Hit) -> Hit:
    message = found.message.replace(_EFFECT, "where transformers' Trainer trains, it raises ValueError.")
    return replace(found, message=message, severity="info")


def _excluded(name: str, given: Mapping[str, Argument]) -> bool:
    """Whether an argument can't be true, because the other 16-bit type is: TrainingArguments refuses both."""
    other = {"fp16": "bf16", "bf16": "fp16"}.get(name, "")
    return other in given and given[other].value is True


def _differs(config: Config, key: str, name: str, argument: Argument, files: FileSet, *, sure: bool) -> Hit:
    severity: Severity = "error"
    said = f"{name} is {shown(argument.value)} in {argument.name}"
    if not argument.name:
        said = f"{name} is {shown(argument.value)} where nothing is said"
        severity = "info" if name in _OTHERS_TOO and not sure and not _is_plain(files) else "error"
    message = f"'{key}' is {shown(config.get(key))}, but {said}: {_EFFECT}"
    return config.hit(key, message, _AUTO, severity=severity)


def _defaults(files: FileSet, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """What the arguments that nothing gives are, where all that are given are known; their `name` is empty."""
    handed = given.get("deepspeed")
    if handed is None or not isinstance(handed.value, str | dict):
        return {}
    lines = [command for file, command in files.launches() if file.name == handed.name]
    if any(not command.arguments.complete for command in lines):
        return {}
    typed = {name.lstrip("-") for command in lines for name in command.arguments.names}  # their values may be open
    said = {*given, *_own_fields(files), *typed}
    return {name: Argument(value, "", START) for name, value in _DEFAULTS.items() if name not in said}


def _own_fields(files: FileSet) -> set[str]:
    """Fields of the classes in scripts, which may be arguments with other defaults."""
    return {
        line.target.id
        for script in scripts(files)
        for node in script.nodes
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _is_plain(files: FileSet) -> bool:
    """Whether scripts are seen to use the Trainer's own class of arguments."""
    names = {
        node.id for script in scripts(files) for node in script.nodes if isinstance(node, ast.Name)
    }
    return bool(names & _PLAIN) and not any(name.endswith("Config") for name in names)


def _with_evaluation(told: Mapping[str, Argument]) -> dict[str, Argument]:
    """fp16_full_eval and bf16_full_eval count as fp16 and bf16."""
    full = {name: told.get(f"{name}_full_eval") for name in ("fp16", "bf16")}
    return {**told, **{name: argument for name, argument in full.items() if argument and argument.value is True}}


def _with_warmup(told: Mapping[str, Argument]) -> dict[str, Argument]:
    """warmup_steps below 1, and warmup_ratio, as steps of max_steps; without it they aren't known."""
    steps, ratio = told.get("warmup_steps"), told.get("warmup_ratio")
    share = steps if steps and isinstance(steps.value, float) and 0 < steps.value < 1 else None
    if share is None and (steps is None or steps.value == 0):
        share = ratio if ratio and isinstance(ratio.value, float) and ratio.value > 0 else None
    if share is None:
        return dict(told)
    total = told["max_steps"].value if "max_steps" in told else -1
    known = {name: argument for name, argument in told.items() if name != "warmup_steps"}
    if not isinstance(total, int) or total <= 0:
        return known
    return {**known, "warmup_steps": Argument(ceil(total * share.value), share.name, share.at)}


def _is_unset(name: str, argument: Any, value: Any) -> bool:
    """max_steps -1 leaves the number to the epochs; no warm-up counts as 1 step, or none up to 4.x."""
    if name == "warmup_steps" and argument == 0:
        return value in (0, 1)
    return name == "max_steps" and argument == -1


def _betas(config: Config, told: Mapping[str, Argument]) -> Iterator[Hit]:
    value, key = config.get("optimizer.params.betas"), "optimizer.params.betas"
    both = [told.get(name) for name in ("adam_beta1", "adam_beta2")]
    if not isinstance(value, list) or any(each is None for each in both):
        return
    wanted = [each.value for each in both if each]
    if value != wanted:
        message = f"'{key}' is {value}, but adam_beta1 and adam_beta2 are {wanted}: {_EFFECT}"
        yield config.hit(key, message, _AUTO)


def _batch(config: Config, told: Mapping[str, Argument]) -> Iterator[Hit]:
    """train_batch_size against what the arguments make, and accumulation that only the arguments tell."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (told[name].value if name in told else None for name in names)
    total = config.get("train_batch_size")
    if "gradient_accumulation_steps" not in config.file.value and isinstance(steps, int) and steps > 1:
        raises = total == "auto" and "train_micro_batch_size_per_gpu" in config.file.value
        effect = "DeepSpeed asserts otherwise" if raises else "accelerate before 1.8 steps after each pass"
        message = f"gradient_accumulation_steps is {steps}, and the file has none, which counts as 1: {effect}."
        severity: Severity = "error" if raises else "info"
        fix = 'Write "gradient_accumulation_steps": "auto".'
        yield config.hit("gradient_accumulation_steps", message, fix, severity=severity)
    if not (_is_size(total) and _is_size(micro) and _is_size(steps)):
        return
    written = [config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    world = config.world
    product = micro * steps * (world or 1)
    if (total == product if world else total % product == 0) or all(isinstance(each, int) for each in written):
        return
    ranks = f" * {world} ranks = {product}" if world else ", on any number of ranks"
    message = f"train_batch_size is {total}, but the arguments make {micro} * {steps}{ranks}: {_EFFECT}"
    yield config.hit("train_batch_size", message, _AUTO)


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0
