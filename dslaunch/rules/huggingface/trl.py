"""TRL's trainers and their configurations: arguments that newer versions no longer take, GRPO's groups."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_Last = tuple[str, str]
"""The last version seen to take it, and the first seen to refuse it."""
_GONE_0_13: _Last = ("0.12.2", "0.13.0")
_GONE_0_18: _Last = ("0.17.0", "0.18.2")
_GONE_0_29: _Last = ("0.24.0", "0.29.0")
_GONE: Mapping[str, Mapping[str, _Last]] = {
    "SFTConfig": {
        "max_seq_length": ("0.19.1", "0.20.0"), "chars_per_token": _GONE_0_18, "dataset_batch_size": _GONE_0_18,
        "num_of_sequences": _GONE_0_18, "use_liger": _GONE_0_18,
    },
    "SFTTrainer": {
        "tokenizer": ("0.15.2", "0.16.1"), "model_init": ("0.13.0", "0.15.2"),
        **dict.fromkeys(
            ("chars_per_token", "dataset_batch_size", "dataset_kwargs", "dataset_num_proc", "dataset_text_field",
             "eval_packing", "infinite", "max_seq_length", "model_init_kwargs", "neftune_noise_alpha",
             "num_of_sequences", "packing"),
            _GONE_0_13,
        ),
    },
    "DPOConfig": {
        "is_encoder_decoder": ("0.13.0", "0.15.2"), "max_target_length": ("0.13.0", "0.15.2"),
        "use_num_logits_to_keep": ("0.16.1", "0.17.0"),
        **dict.fromkeys(
            ("base_model_attribute_name", "force_use_ref_model", "generate_during_eval", "label_pad_token_id",
             "max_completion_length", "max_prompt_length", "model_adapter_name", "padding_value",
             "ref_adapter_name", "ref_model_init_kwargs", "reference_free", "rpo_alpha", "tools",
             "use_liger_loss", "use_logits_to_keep"),
            _GONE_0_29,
        ),
    },
    "DPOTrainer": {
        "tokenizer": ("0.15.2", "0.16.1"), "model_init": ("0.18.2", "0.19.1"),
        "optimizer_cls_and_kwargs": _GONE_0_29, "preprocess_logits_for_metrics": _GONE_0_29,
        **dict.fromkeys(
            ("beta", "dataset_num_proc", "disable_dropout", "force_use_ref_model", "generate_during_eval",
             "is_encoder_decoder", "label_pad_token_id", "label_smoothing", "loss_type", "max_length",
             "max_prompt_length", "max_target_length", "model_adapter_name", "model_init_kwargs",
             "padding_value", "precompute_ref_log_probs", "ref_adapter_name", "ref_model_init_kwargs",
             "reference_free", "truncation_mode"),
            _GONE_0_13,
        ),
    },
}  # fmt: skip
"""huggingface/trl:trl/trainer, the signatures of 15 versions from 0.9.6 to 1.16.0 compared."""
_INSTEAD: Mapping[tuple[str, str], str] = {
    ("SFTConfig", "max_seq_length"): "max_length",
    ("SFTConfig", "use_liger"): "use_liger_kernel",
    ("SFTTrainer", "tokenizer"): "processing_class",
    ("DPOTrainer", "tokenizer"): "processing_class",
    ("SFTTrainer", "max_seq_length"): "max_length of SFTConfig",
    ("DPOConfig", "max_prompt_length"): "max_length",
}
_OF_CONFIG = frozenset({
    "beta", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "disable_dropout", "eval_packing",
    "label_smoothing", "loss_type", "max_length", "model_init_kwargs", "packing", "precompute_ref_log_probs",
    "truncation_mode",
})  # fmt: skip
"""What the trainer's configuration takes now."""


@rule(
    "script.trl-argument", severity="error", raised_by="python",
    evidence="huggingface/trl:trl/trainer/sft_trainer.py, dpo_trainer.py 0.9.6 to 1.16.0",
)  # fmt: skip
def removed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An argument that TRL's trainer or its configuration no longer has."""
    for script in scripts(files):
        for name, gone in _GONE.items():
            for call in script.called(f"trl.{name}"):
                for argument, (last, newer) in gone.items():
                    given = call.keyword(argument)
                    if given is not None:
                        message = f"TRL {newer} and newer have no {argument} in {name}: TypeError. {last} has it."
                        found = Hit(script.path, script.python.at(given), message, _fix(name, argument))
                        yield found if _is_new(script) else replace(found, severity="info")


def _fix(name: str, argument: str) -> str:
    if instead := _INSTEAD.get((name, argument)):
        return f"Write {instead}."
    if name.endswith("Trainer") and argument in _OF_CONFIG:
        return f"Give it to {name.removesuffix('Trainer')}Config."
    return "Take it out."


def _is_new(script: Script) -> bool:
    """Whether a model is loaded with dtype=, which transformers takes since 4.56: TRL is of 2025 then."""
    return any(
        call.keyword("dtype") is not None and call.owner.rpartition(".")[2].startswith("AutoModel")
        for call in script.methods("from_pretrained")
    )


@rule(
    "huggingface.generations", severity="error", raised_by="python",
    evidence="huggingface/trl:trl/trainer/grpo_config.py __post_init__ 1.16.0",
)  # fmt: skip
def generations(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """GRPO with a batch that holds no whole number of groups of completions."""
    for script in scripts(files) if settings.world_size is not None else ():
        for call in script.called("trl.GRPOConfig"):
            told = {
                name: default if (given := call.keyword(name)) is None else script.constant(given)
                for name, default in _OF_GRPO.items()
            }  # fmt: skip
            others = {"generation_batch_size", "steps_per_generation"} & {each.arg for each in call.node.keywords}
            micro, steps, group = told.values()
            if others or call.unpacks or not all(type(each) is int and each > 0 for each in told.values()):
                continue
            assert settings.world_size is not None
            batch = micro * settings.world_size * steps
            if batch % group or group == 1:
                message = (
                    f"{micro} samples on {settings.world_size} ranks in {steps} steps are {batch} completions, no "
                    f"multiple of num_generations {group}: ValueError."
                )
                if group == 1:
                    message = "num_generations is 1, and GRPO compares completions of one prompt: ValueError."
                fix = "Choose per_device_train_batch_size * ranks as a multiple of num_generations, 2 or more."
                yield script.hit(call, message, fix)


_OF_GRPO = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
"""And what these are where nothing is said."""


@rule(
    "huggingface.reward-function", severity="error", raised_by="python",
    evidence="huggingface/trl:trl/trainer/grpo_trainer.py _calculate_rewards 0.14.0, 0.17.0, 0.24.0 and 1.16.0",
)  # fmt: skip
def reward_function(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A reward function that doesn't take what GRPO's trainer hands it by name."""
    for script in scripts(files):
        for call in script.called("trl.GRPOTrainer"):
            handed = call.argument("reward_funcs", 1)
            given = script.bound(handed) or handed
            for each in given.elts if isinstance(given, ast.List | ast.Tuple) else [given]:
                function = script.functions.get(each.id) if isinstance(each, ast.Name) else each
                if isinstance(each, ast.Call):
                    function = _called(script, script.name(each.func))
                if isinstance(function, ast.FunctionDef) and not function.decorator_list:
                    yield from _lacking(script, function, function.name)
                elif isinstance(function, ast.Lambda):
                    yield from _lacking(script, function, "this lambda")


def _called(script: Script, name: str) -> ast.FunctionDef | None:
    """What is called of an object of the file's class."""
    classes = (each for each in script.python.tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    parts = (part for each in classes for part in each.body)
    return next((each for each in parts if isinstance(each, ast.FunctionDef) and each.name == "__call__"), None)


_HANDED = ("prompts", "completions")


def _lacking(script: Script, function: ast.FunctionDef | ast.Lambda, name: str) -> Iterator[Hit]:
    taken = function.args
    names = {each.arg for each in (*taken.args, *taken.kwonlyargs)}
    lacks = [each for each in _HANDED if each not in names]
    if taken.kwarg is not None:
        return
    at = script.python.at(function)
    if lacks:
        message = f"GRPOTrainer hands {name} {listed(lacks)} by name, which it lacks: TypeError in the first step."
        yield Hit(script.path, at, message, "Add **kwargs to its arguments.")
    elif "completion_ids" not in names:
        message = f"TRL 0.24 and newer hand {name} completion_ids too, by name: TypeError in the first step."
        yield Hit(script.path, at, message, "Add **kwargs to its arguments.", severity="info")
