"""A DeepSpeed JSON that the Hugging Face Trainer reads, against the Trainer's own arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.engines.trainer_catalogue import trainer_words
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments, is_told
from dslaunch.files.kinds import Kind, looks_like_json
from dslaunch.files.megatron import is_megatron
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config, configs
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import reads_json_itself
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_OWN = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
_NAMES = frozenset({"output_dir", "run_name", "logging_dir", "hub_model_id", "seed"})
"""Arguments that are seldom written out, and that no rule looks at."""


@dataclass(frozen=True)
class Argument:
    """One argument of the Trainer."""

    value: Any
    name: str
    """The file it stands in."""
    at: Position


def arguments(files: FileSet) -> dict[str, Argument]:
    """The Trainer's arguments that files and command lines give, by name; of several runs those of all."""
    of_files, of_lines = _given(files)
    found: dict[str, Argument] = {}
    for given in (*of_files, *of_lines):
        found |= given
    return found or _of_scripts(files)


def runs(files: FileSet) -> list[dict[str, Argument]]:
    """The arguments of each run by itself: a command line, with the one file of arguments beside it, or a file."""
    of_files, of_lines = _given(files)
    if len(of_files) > 1 or not of_lines:
        return [*of_files, *of_lines] or [_of_scripts(files)]
    beside = of_files[0] if of_files else {}
    return [beside | given for given in of_lines]


def runs_reading(files: FileSet, every: Iterable[Config]) -> Iterator[tuple[dict[str, Argument], list[Config]]]:
    """Each run with those of the DeepSpeed configurations that it reads, or may read where it names none."""
    found, known = runs(files), list(every)
    some_name_one = any("deepspeed" in given for given in found)
    for given in found:
        yield given, [] if some_name_one and "deepspeed" not in given else _read_by(given, known)


def _read_by(given: Mapping[str, Argument], found: list[Config]) -> list[Config]:
    named = given["deepspeed"].value if "deepspeed" in given else None
    if len(found) < 2 or not isinstance(named, str) or not is_told(named):
        return found
    name = named.rpartition("/")[2]
    return [config for config in found if config.file.inside or config.file.name.rpartition("/")[2] == name]


def _given(files: FileSet) -> tuple[list[dict[str, Argument]], list[dict[str, Argument]]]:
    """The arguments in each file of them, and on each command line."""
    of_files = [
        {name: Argument(value, file.name, file.at(name)) for name, value in file.value.items()}
        for file in files.of("hf_arguments") if isinstance(file.value, dict)
    ]  # fmt: skip
    of_lines: list[dict[str, Argument]] = []
    for file, command in files.launches():
        if is_megatron(command) or reads_json_itself(files, command):
            continue
        if command.arguments.has("--deepspeed") or any(of_files) or of_lines or _is_trainers(command.arguments):
            of_lines.append({
                flag.name.removeprefix("--").replace("-", "_"): Argument(value, file.name, flag.at)
                for flag in command.arguments.flags
                if (value := _typed(flag.values)) is not None
            })
    return of_files, of_lines


TRAINERS_OWN = ("logging_steps", "save_steps", "save_strategy", "save_total_limit", "do_train", "bf16", "fp16")
"""Of these one stands beside the batch per device where the Trainer reads a command line."""


def _is_trainers(given: Arguments) -> bool:
    """Whether a program with the Trainer's arguments is started."""
    batch = given.has("--per_device_train_batch_size", "--per-device-train-batch-size")
    return batch and any(given.has(f"--{name}", f"--{name.replace('_', '-')}") for name in TRAINERS_OWN)


def _of_scripts(files: FileSet) -> dict[str, Argument]:
    """What a script hands to TrainingArguments, where one call does.

    Without a DeepSpeed configuration among them it is transformers' own class, and everything is written out.
    """
    calls = [
        (script, call) for script in scripts(files) for call in script.calls
        if call.name in _OWN
        or (call.method.endswith(("Arguments", "Config")) and call.keyword("deepspeed") is not None)
    ]  # fmt: skip
    if len(calls) != 1 or calls[0][1].unpacks:
        return {}
    script, call = calls[0]
    given = {each.arg: each.value for each in call.node.keywords if each.arg}
    if "deepspeed" not in given and not all(
        name in _NAMES or isinstance(script.bound(value), ast.Constant) for name, value in given.items()
    ):
        return {}
    return {
        name: Argument(constant.value, script.path, script.python.at(value))
        for name, value in given.items()
        if isinstance(constant := script.bound(value), ast.Constant)
    }


def _typed(values: tuple[str, ...]) -> Any:
    """A value as the argument parser of transformers makes it; None where it isn't told."""
    if len(values) > 1 or not all(is_told(value) for value in values):
        return None
    text = values[0] if values else "true"
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


_READERS: Mapping[Kind, str] = {
    "deepspeed_json": "DeepSpeed reads {}; Hugging Face",
    "hf_arguments": "no JSON holds {}: HfArgumentParser",
    "accelerate": "no JSON holds {}: accelerate",
    "hf_model": "no JSON holds {}: transformers",
}
"""Who reads a kind of file as strict JSON, behind who or what doesn't."""


@rule(
    "huggingface.json", severity="error", raised_by="transformers",
    evidence="huggingface/accelerate:src/accelerate/utils/deepspeed.py HfDeepSpeedConfig 1.15.0, run; "
    "huggingface/transformers:src/transformers/hf_argparser.py parse_json_file 5.24.0, run",
)  # fmt: skip
def strict_json(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Comments, commas or a mark in a JSON that Hugging Face reads, and that DeepSpeed would take."""
    for file in files.of(*_READERS):
        if file.value is None or file.inside or (file.kind == "deepspeed_json" and not settings.huggingface):
            continue
        if at := _no_json(file):
            what, fix = "comments, trailing commas and bare words", "no comment, no comma before a bracket"
            if file.text.startswith("\ufeff"):
                what, fix = "a byte order mark", "save it as UTF-8 without a mark (BOM)"
            message = f"{_READERS[file.kind].format(what)} raises JSONDecodeError."
            yield Hit(file.name, at, message, f"Write strict JSON: {fix}.")


def _no_json(file: File) -> Position | None:
    """Where Python's json stops in a JSON file."""
    try:
        if looks_like_json(file.name, file.text):
            json.loads(file.text)
    except ValueError as error:
        return Position(getattr(error, "lineno", 1), getattr(error, "colno", 1))
    except RecursionError:
        pass
    return None


@rule(
    "huggingface.fsdp", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/training_args.py, trainer.py 5.24.0",
)  # fmt: skip
def fsdp(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """FSDP and DeepSpeed asked for together."""
    for given in runs(files):
        if given.get("deepspeed") and given.get("fsdp") and given["fsdp"].value not in ("", False, None, []):
            message = "fsdp together with deepspeed: the Trainer raises ValueError."
            yield Hit(given["fsdp"].name, given["fsdp"].at, message, "Keep one of them.")


_INSTEAD = {
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "train_sampling_strategy",
    "logging_dir": "the variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "nothing: the folder is written to as it is",
    "save_safetensors": "nothing: safetensors is the only format",
    "adafactor": "optim: adafactor",
    "fp16_backend": "nothing", "half_precision_backend": "nothing",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config", "fsdp_min_num_params": "fsdp_config",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "dispatch_batches": "accelerator_config", "split_batches": "accelerator_config",
    "push_to_hub_model_id": "hub_model_id", "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
    "warmup_ratio": "warmup_steps, which takes a ratio below 1",
}


@rule(
    "huggingface.removed", severity="info", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/training_args.py, trainer.py 4.40.2 to 5.24.0, run",
)  # fmt: skip
def removed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An argument of the Trainer that newer versions of transformers no longer take."""
    known = trainer_words("arguments")
    yield from _tokenizers(files)
    for name, argument in (*arguments(files).items(), *_more_of_calls(files)):
        if name in known and known[name].until:
            last, newer = known[name].until, known[name].next
            message = f"transformers {newer} and newer have no {name}, and refuse it; {last} takes it."
            instead = f" Use {_INSTEAD[name]}." if name in _INSTEAD else ""
            yield Hit(argument.name, argument.at, message, f"Take it out for newer versions.{instead}")


def _more_of_calls(files: FileSet) -> Iterator[tuple[str, Argument]]:
    """What calls of transformers' own class give, where `arguments` doesn't hold it: it is computed in part."""
    held = {(each.name, each.at) for each in arguments(files).values()}
    for script in scripts(files):
        for call in script.called(*_OWN):
            for keyword in call.node.keywords:
                at = script.python.at(keyword.value)
                if keyword.arg and (script.path, at) not in held:
                    yield keyword.arg, Argument(None, script.path, at)


def _tokenizers(files: FileSet) -> Iterator[Hit]:
    """`Trainer(tokenizer=...)`: the same, of the Trainer itself."""
    for script in scripts(files):
        for call in script.called("transformers.Trainer", "transformers.Seq2SeqTrainer"):
            if (given := call.keyword("tokenizer")) is not None:
                message = (
                    f"transformers 5.0.0 and newer have no tokenizer in {call.method}: TypeError; 4.57.6 takes it."
                )
                fix = "Write processing_class=..., which 4.46 and newer take."
                yield Hit(script.path, script.python.at(given), message, fix)


@rule(
    "huggingface.optimizer", severity="info", raised_by="nobody",
    evidence="huggingface/transformers:src/transformers/integrations/deepspeed.py deepspeed_optim_sched 5.24.0",
)  # fmt: skip
def optimizer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Settings of the Trainer that an optimizer or scheduler section in the file overrides."""
    for given, read in runs_reading(files, configs(plan, files, settings)):
        for config in read:
            yield from _overridden(given, config)


def _overridden(given: Mapping[str, Argument], config: Config) -> Iterator[Hit]:
    for name, section in (("optim", "optimizer"), ("lr_scheduler_type", "scheduler")):
        chosen, written = given.get(name), config.get(f"{section}.type")
        if chosen and isinstance(written, str) and not _agree(chosen.value, config, section):
            message = f"{name} {chosen.value} is not used: the {section} section says {written}."
            yield Hit(chosen.name, chosen.at, message, f"Delete the {section} section, or {name}.")


_SAME = {"linear": ("WarmupDecayLR",), "constant_with_warmup": ("WarmupLR",), "cosine": ("WarmupCosineLR",)}


def _agree(chosen: Any, config: Config, section: str) -> bool:
    kind = str(config.get(f"{section}.type"))
    if section == "scheduler":
        return kind in _SAME.get(str(chosen), ())
    return str(chosen).partition("_")[0].lower() == kind.lower()
