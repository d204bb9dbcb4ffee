"""Arguments of the Hugging Face Trainer one by one: misspelt, or with a value that it doesn't take."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from dslaunch.engines.trainer_catalogue import TrainerWords, trainer_words
from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.huggingface.trainer import TRAINERS_OWN, Argument, arguments
from dslaunch.rules.registry import Edit, Hit, Severity, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"
_SLIP = 0.88
"""How near (difflib) a name is to an argument where it is misspelt."""
_OTHERS = frozenset({
    "eval_step", "num_train_steps", "max_train_steps", "warmup_steps_ratio", "min_learning_rate", "save_step",
    "logging_path", "train_batch_size", "eval_batch_size", "label_name", "do_training", "num_epochs",
})  # fmt: skip
"""Names that programs with arguments of their own have, near as they are."""
_LOOKED_AT = 300
"""Names of no argument that are compared with them; the longest file seen has some 150."""
_WORDS = re.compile(r"[^_]+")


@rule(
    "huggingface.argument", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/hf_argparser.py parse_dict, training_args.py 4.40.2 to 5.24.0, run",
)  # fmt: skip
def argument(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A misspelt argument of the Trainer: no version of transformers has it."""
    known = trainer_words("arguments")
    found = arguments(files)
    shells = {file.name for file in files.of("shell")}
    typed = {name for name, given in found.items() if given.name in shells}
    of_calls = tuple(islice(_of_calls(files), _LOOKED_AT))
    yield from of_calls
    reported = {(each.name, each.at) for each in of_calls}
    if not any(name in found for name in TRAINERS_OWN):
        found = {name: given for name, given in found.items() if name not in typed}  # of a program of its own
    odd = (
        (name, given) for name, given in found.items()
        if name not in known and (given.name, given.at) not in reported
    )  # fmt: skip
    for name, given in islice(odd, _LOOKED_AT):
        right = slip(name, known)
        if not right or right in found or (name in typed and _abbreviates(name, known)):
            continue
        message = f"the Trainer has no argument {name}: HfArgumentParser raises ValueError.{nearest(name, known)}"
        edit = None if name in typed else Edit(given.at, name, right)
        yield Hit(given.name, given.at, message, f"Write {right}.", edit=edit)


def _of_calls(files: FileSet) -> Iterator[Hit]:
    """The class itself takes no other keyword at all."""
    known = trainer_words("arguments")
    for script in scripts(files):
        own = {node.name for node in script.nodes if isinstance(node, ast.ClassDef)}
        for call in script.calls:
            elsewhere = call.name.partition(".")[0] not in ("transformers", call.method)
            if call.method not in _CLASSES or call.method in own or elsewhere:
                continue
            for keyword in (*call.node.keywords, *_unpacked(script, call)):
                if call.method == _CLASSES[0] and keyword.arg in _SEQ2SEQ:
                    at = script.python.at(keyword.value)
                    message = f"{call.method} has no argument {keyword.arg}: TypeError; {_CLASSES[1]} has it."
                    yield Hit(script.path, at, message, f"Use {_CLASSES[1]}.")
                elif keyword.arg and keyword.arg not in known:
                    near = nearest(keyword.arg, known)
                    message = f"{call.method} has no argument {keyword.arg}: TypeError.{near}"
                    at = script.python.at(keyword.value)
                    yield Hit(script.path, at, message, "Correct it, or take it out.")


def _unpacked(script: Script, call: Call) -> Iterator[ast.keyword]:
    """What `**given` holds, where that is written out in one place."""
    for each in call.node.keywords:
        made = possible(script, each.value, call.around) if each.arg is None else []
        found = made[0] if len(made) == 1 else None
        if isinstance(found, ast.Dict):
            pairs = zip(found.keys, found.values, strict=True)
            told = ((key.value, value) for key, value in pairs if isinstance(key, ast.Constant))
            yield from (ast.keyword(name, value) for name, value in told if isinstance(name, str))
        elif isinstance(found, ast.Call) and script.name(found.func) == "dict":
            yield from found.keywords


_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments")
_SEQ2SEQ = frozenset({
    "sortish_sampler", "predict_with_generate", "generation_max_length", "generation_num_beams",
    "generation_config",
})  # fmt: skip
"""What the second class alone takes: training_args_seq2seq.py 4.40.2 to 5.24.0."""


def slip(name: str, known: Mapping[str, object]) -> str:
    """The argument that a name is a misspelling of; empty where it may be something of its own."""
    if name in known or name in _OTHERS or not re.fullmatch(r"[A-Za-z_]+", name):
        return ""
    near = get_close_matches(name, known, n=3, cutoff=_SLIP)
    near = [each for each in near if re.fullmatch(r"\D+", each)]  # adam_betas is no slip for adam_beta2
    alike = (each for each in near if len(_WORDS.findall(each)) == len(_WORDS.findall(name)))
    return next(alike, "")


def _abbreviates(name: str, known: Mapping[str, object]) -> bool:
    """HfArgumentParser takes a name cut short on a command line."""
    return any(each.startswith(name) for each in known)


_ENUMS: Mapping[str, TrainerWords] = {
    "eval_strategy": "strategies", "evaluation_strategy": "strategies", "logging_strategy": "strategies",
    "save_strategy": "save_strategies", "lr_scheduler_type": "schedulers", "optim": "optimizers",
    "hub_strategy": "hub_strategies",
}  # fmt: skip
_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_TRACKERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow",
    "neptune", "swanlab", "tensorboard", "trackio", "wandb", "all", "none",
)  # fmt: skip
"""What report_to takes in 5.24.0, the newest; older versions have fewer."""
_FLOATS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
           "num_train_epochs", "warmup_ratio", "max_steps", "per_device_train_batch_size",
           "gradient_accumulation_steps", "logging_steps", "save_steps", "eval_steps", "warmup_steps")  # fmt: skip
_POSITIVE = ("per_device_train_batch_size", "torch_empty_cache_steps")
_BY_STEPS: Mapping[str, tuple[str, ...]] = {
    "logging_steps": ("logging_strategy",), "eval_steps": ("eval_strategy", "evaluation_strategy"),
    "save_steps": ("save_strategy",),
}  # fmt: skip
"""Whole numbers, or shares of the run, that are read where this strategy is `steps`."""
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda rate: rate >= 0, "a number from 0 on"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (lambda beta: 0 <= beta < 1, "a number from 0 to below 1")),
    "adam_epsilon": (lambda size: size >= 0, "a number from 0 on"),
    "seed": (lambda seed: 0 <= seed < 2**32, "a whole number from 0 to 4294967295"),
    "dataloader_num_workers": (lambda count: count >= 0, "0, or a number of processes"),
    "dataloader_prefetch_factor": (lambda count: count > 0, "a number of batches from 1 on"),
    "gradient_accumulation_steps": (lambda count: count != 0, "a number from 1 on"),
    "per_device_train_batch_size": (lambda size: isinstance(size, int), "a whole number"),
}
"""What the optimizer, the loader or numpy, which the Trainer hands it to, takes."""
OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
"""Of which other optimizers see nothing."""
_WORDS_OF: Mapping[str, tuple[str, ...]] = {
    "debug": ("underflow_overflow", "tpu_metrics_debug"),
    "accelerator_config": (
        "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
        "gradient_accumulation_kwargs", "use_configured_state",
    ),
    "ddp_backend": ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl", "ccl"),
}  # fmt: skip
"""Words that these are made of: 5.24.0."""
_DICTS = ("accelerator_config", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
          "lr_scheduler_kwargs")  # fmt: skip


@rule(
    "huggingface.value", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/training_args.py __post_init__, trainer_utils.py 4.40.2 to 5.24.0, run",
)  # fmt: skip
def value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value that an argument of the Trainer doesn't take: a word it doesn't know, or a number that is none."""
    shells = {file.name for file in files.of("shell")}  # where one word makes a list too
    told = arguments(files)
    for name, given in told.items():
        if name == "label_names" and isinstance(given.value, str) and given.name not in shells:
            message = f"label_names is {shown(given.value)}, no list: TypeError where the Trainer evaluates."
            yield Hit(given.name, given.at, message, f'Write ["{given.value}"].')
        if isinstance(given.value, str) and (not is_told(given.value) or "{{" in given.value):
            continue
        if is_unread(name, told) and (name in OF_ADAM or not isinstance(given.value, str)):
            continue
        if found := _fault(name, given.value):
            yield Hit(given.name, given.at, f"{name} is {shown(given.value)}: {found[0]}", found[1])
        elif name in _FLOATS and isinstance(given.value, str) and not _is_of_others(files, given.name):
            yield _text(files, name, given)


def is_unread(name: str, told: Mapping[str, Argument]) -> bool:
    """Whether another argument keeps this one from being looked at."""
    if name in OF_ADAM:
        return "optim" in told and "adam" not in str(told["optim"].value)
    strategies = [told[each].value for each in _BY_STEPS.get(name, ()) if each in told]
    if name == "eval_steps" and not strategies:
        return True
    return bool(strategies) and strategies[0] != "steps"


def _fault(name: str, given: Any) -> tuple[str, str] | None:
    """What transformers says of a value, and the fix; None where it takes it."""
    if name in _ENUMS:
        words = trainer_words(_ENUMS[name])
        if isinstance(given, bool):
            return "YAML reads no without quotes as false, and transformers raises ValueError.", 'Write "no".'
        if isinstance(given, str) and given not in words:
            return f"transformers raises ValueError.{nearest(given, words)}", f"Use one of {listed(words)}."
    if name in ("log_level", "log_level_replica") and isinstance(given, str) and given not in _LEVELS:
        return "the Trainer raises KeyError.", f"Use one of {listed(_LEVELS)}."
    if name == "report_to":
        unknown = [each for each in (given if isinstance(given, list) else [given]) if _is_no_tracker(each)]
        if unknown:
            near = nearest(str(unknown[0]), _TRACKERS)
            return f"the Trainer knows no {unknown[0]}, and raises ValueError.{near}", f"Use {listed(_TRACKERS)}."
    if name == "fsdp" and isinstance(given, str):
        words = trainer_words("fsdp_options")
        unknown = [each for each in given.split() if each.lower() not in (*words, "true", "false")]
        if unknown:
            return f"FSDP has no option {unknown[0]}: ValueError.", f"Use {listed(words)}."
    if found := _wrong_words(name, given):
        return found
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else None
    if number is None:
        return None
    fits, words = _RANGES.get(name, (lambda _: True, ""))
    if not fits(number):
        return f"it has to be {words}, or the Trainer raises.", f"Write {words}."
    if name in _POSITIVE and number <= 0:
        return "the Trainer computes with it, and raises.", "Write a number from 1 on."
    if name in _BY_STEPS and number > 1 and number != int(number):
        return "above 1 it has to be a whole number: ValueError.", "Write steps, or a share below 1."
    if name == "warmup_steps" and number < 0:
        return "transformers raises ValueError.", "Write steps, or 0."
    return None


def _wrong_words(name: str, given: Any) -> tuple[str, str] | None:
    """A word of several, a key of a section, or a section written as text that no JSON is."""
    if name in _DICTS and isinstance(given, str) and given.startswith("{"):
        try:
            json.loads(given)
        except ValueError:
            return "transformers reads it as JSON, and raises.", "Write it as JSON, its keys in double quotes."
    parts = given.split(",") if name == "optim_args" and isinstance(given, str) and given else []
    if any("=" not in part for part in parts):
        return "each part between commas is to be name=value: ValueError.", "Write name=value,name=value."
    known, words = _WORDS_OF.get(name, ()), _words(given)
    unknown = [word for word in words if known and word not in known]
    if not unknown:
        return None
    near = nearest(str(unknown[0]), known)
    return f"there is no {unknown[0]}, and transformers raises.{near}", f"Use {listed(known)}."


def _words(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [] if given.startswith("{") or given.endswith(".json") else given.split()
    return list(given) if isinstance(given, dict | list) else []


def _is_no_tracker(word: object) -> bool:
    return isinstance(word, str) and word.isascii() and word not in _TRACKERS


def _text(files: FileSet, name: str, given: Argument) -> Hit:
    """A number written as text. Some programs convert it; HfArgumentParser's parse_yaml_file doesn't."""
    severity: Severity = "error" if given.name in read_as_they_are(files) or _is_read_as_it_is(files) else "info"
    reader = "HfArgumentParser" if severity == "error" else "HfArgumentParser, if that reads the file,"
    message = f"{name} is {shown(given.value)}, a text to YAML and JSON: {reader} hands it on as it is."
    fix = "Write it as a number; YAML wants a point in 2.0e-5."
    return Hit(given.name, given.at, f"{message} The optimizer, or the Trainer, raises TypeError.", fix, severity)


def _is_of_others(files: FileSet, name: str) -> bool:
    """Whether a file is of a program that makes numbers of texts by itself: axolotl, Hydra, ms-swift."""
    held = [file.value for file in files.of("hf_arguments") if file.name == name and isinstance(file.value, dict)]
    own = any({"base_model", "defaults", "hydra"} & {str(key) for key in value} for value in held)
    words = (command.script.text for _, command in files.launches() if command.script is not None)
    return own or any(word.rpartition("/")[2] in ("swift", "axolotl") for word in words)


def read_as_they_are(files: FileSet) -> set[str]:
    """The files of arguments that transformers itself seems to read, which converts nothing."""
    names = {file.name for file in files.of("hf_arguments")}
    return names if _is_read_as_it_is(files) else {name for name in names if _are_trainers_own(files, name)}


def _are_trainers_own(files: FileSet, name: str) -> bool:
    """Whether a file has TrainingArguments' names alone; programs that convert texts have more of their own."""
    known = trainer_words("arguments")
    by_option = any(command.arguments.has("--config") for _, command in files.launches())
    return not by_option and any(
        isinstance(file.value, dict) and all(str(key) in known for key in file.value)
        and any(type(file.value.get(each)) in (int, float) for each in _FLOATS)
        for file in files.of("hf_arguments") if file.name == name
    )  # fmt: skip


def _is_read_as_it_is(files: FileSet) -> bool:
    nodes = (node for script in scripts(files) for node in script.nodes)
    return any(isinstance(node, ast.Attribute) and node.attr in _READERS for node in nodes)


_READERS = ("parse_json_file", "parse_yaml_file", "parse_dict")
