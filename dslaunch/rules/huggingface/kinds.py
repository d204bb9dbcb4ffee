"""What kind of value an argument of the Trainer holds, where JSON, YAML or Python hands it on as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.huggingface.arguments import OF_ADAM, is_unread, read_as_they_are
from dslaunch.rules.huggingface.schedule import SCHEDULES
from dslaunch.rules.huggingface.trainer import TRAINERS_OWN, Argument, runs
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_OWN = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
_NUMBERS = frozenset({
    "learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "warmup_steps", "logging_steps",
    "save_steps", "label_smoothing_factor", *OF_ADAM,
})  # fmt: skip
_WHOLE = frozenset({
    "max_steps", "gradient_accumulation_steps", "per_device_train_batch_size", "seed", "dataloader_num_workers",
})  # fmt: skip
_WHOLE_OR_NULL = frozenset({"data_seed", "torch_empty_cache_steps"})
_COUNTS = ("seed", "data_seed", "dataloader_num_workers", "torch_empty_cache_steps")
"""Of which huggingface.value doesn't judge texts."""
_WORDS = frozenset({
    "lr_scheduler_type", "optim", "logging_strategy", "eval_strategy", "evaluation_strategy", "save_strategy",
    "hub_strategy", "log_level", "log_level_replica",
})  # fmt: skip
_LEVELS = ("log_level", "log_level_replica")
_SWITCHES = frozenset({
    "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "gradient_checkpointing", "do_train", "do_eval",
    "load_best_model_at_end", "save_only_model", "remove_unused_columns", "dataloader_drop_last",
    "ddp_find_unused_parameters", "push_to_hub", "logging_first_step", "full_determinism", "ignore_data_skip",
    "torch_compile", "auto_find_batch_size", "eval_on_start", "use_liger_kernel", "prediction_loss_only",
})  # fmt: skip
_OFF = ("false", "no", "off", "0", "none", "null")
_PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")


@rule(
    "huggingface.type", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/training_args.py __post_init__, trainer.py, "
    "optimization.py 5.24.0, run",
)  # fmt: skip
def kind(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value of a kind that the argument can't be: null for a number, half a step, a text for a switch."""
    found = {(each.name, each.at): each for each in (*_of_files(files), *_of_calls(files))}
    yield from found.values()


def _of_files(files: FileSet) -> Iterator[Hit]:
    """Files of arguments that transformers is seen to read as they stand, and whole numbers on command lines."""
    as_they_are = read_as_they_are(files)
    shells = {file.name for file in files.of("shell")}
    for given in runs(files):
        of_trainer = any(name in given for name in TRAINERS_OWN)
        for name, argument in given.items():
            if argument.name in as_they_are and (fault := _fault(name, argument.value, given)):
                yield _hit(name, argument, fault)
            elif argument.name in shells and of_trainer and name in _WHOLE and isinstance(argument.value, float):
                yield _hit(name, argument, ("HfArgumentParser reads a whole number, and ends.", "Write one."))


def _of_calls(files: FileSet) -> Iterator[Hit]:
    for given in handed(files):
        for name, argument in given.items():
            value = argument.value
            if value is not ... and (fault := _fault(name, value, given) or _beta(name, value, given)):
                yield _hit(name, argument, fault)


def handed(files: FileSet) -> Iterator[dict[str, Argument]]:
    """What each call in a script hands to transformers' own classes; `...` for a value that isn't written out."""
    for script in scripts(files):
        for call in script.called(*_OWN):
            if not call.unpacks:
                yield {
                    each.arg: Argument(_literal(script, each.value), script.path, script.python.at(each.value))
                    for each in call.node.keywords if each.arg
                }  # fmt: skip


def _literal(script: Script, node: ast.expr) -> Any:
    """The value of a literal, a name's too where it is bound once; `...` for anything else."""
    found = script.bound(node)
    return found.value if isinstance(found, ast.Constant) else ...


def _hit(name: str, argument: Argument, fault: tuple[str, str]) -> Hit:
    silent = name in _SWITCHES
    return Hit(
        argument.name, argument.at, f"{name} is {shown(argument.value)}: {fault[0]}", fault[1],
        severity="wrong" if silent else "error", raised_by="nobody" if silent else "transformers",
    )  # fmt: skip


def _fault(name: str, value: Any, given: Mapping[str, Argument]) -> tuple[str, str] | None:
    """What transformers makes of a value, and the fix; None where its kind is right, or another rule tells."""
    if name in _SWITCHES and isinstance(value, str) and value.lower() in _OFF:
        return "a text that isn't empty counts as true.", "Write false, without quotes."
    word = isinstance(value, str) or (isinstance(value, bool) and name not in _LEVELS)
    if name in _WORDS and not word:
        return "transformers looks it up among its words, and raises.", _leave_out(value, "Write a word.")
    if name in _NUMBERS | _WHOLE | _WHOLE_OR_NULL:
        return _number(name, value, given)
    if name == "metric_for_best_model" and value is not None and not isinstance(value, str):
        return "the Trainer takes it for a name, AttributeError.", "Write the name of a metric, such as loss."
    if name == "optim_args" and value and not isinstance(value, str):
        return "the Trainer takes it for a text, AttributeError.", "Write name=value,name=value as one text."
    named = given["lr_scheduler_type"].value if "lr_scheduler_type" in given else "linear"
    taken = value is None or isinstance(value, dict) or str(value).startswith("{")
    if name == "lr_scheduler_kwargs" and "deepspeed" not in given and named in SCHEDULES and not taken:
        return "the schedule takes names with values: TypeError.", 'Write an object: {"num_cycles": 2}.'
    return None


def _number(name: str, value: Any, given: Mapping[str, Argument]) -> tuple[str, str] | None:
    """The same of an argument that counts or measures."""
    unread, whole = is_unread(name, given), name in _WHOLE | _WHOLE_OR_NULL
    if value is None:
        null = name in _WHOLE_OR_NULL or unread
        return None if null else ("transformers compares it with a number: TypeError.", _leave_out(value, ""))
    if isinstance(value, list | dict):
        return None if unread and name in OF_ADAM else ("transformers wants a number: TypeError.", "Write one.")
    if whole and isinstance(value, float) and name != "per_device_train_batch_size":
        return "it has to be a whole number, or what counts by it raises.", "Write it without a point."
    if name in _COUNTS and isinstance(value, str) and is_told(value) and "{{" not in value:
        return "a text is no number, and what counts by it raises.", "Write a whole number, without quotes."
    return None


def _beta(name: str, value: Any, given: Mapping[str, Argument]) -> tuple[str, str] | None:
    """A beta that torch's Adam refuses for its kind; of a JSON's numbers 0 can't be told from 0.0 here."""
    betas = name in ("adam_beta1", "adam_beta2") and value == 0 and type(value) is int
    chosen = given["optim"].value if "optim" in given else _PLAIN_ADAM[0]
    if betas and "deepspeed" not in given and chosen in _PLAIN_ADAM:
        return "torch wants a point in both betas: ValueError.", "Write 0.0."
    return None


def _leave_out(value: Any, fix: str) -> str:
    return "Leave it out for the default." if value is None else fix
