"""Which kind of file a text is: by what it holds; its name is a hint where that leaves a doubt."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from dslaunch.files.position import lines_of
from dslaunch.files.yaml_text import is_manifest

Kind = Literal[
    "deepspeed_json", "hf_arguments", "plan", "prediction", "manifest", "json", "hostfile", "megatron_args",
    "shell", "env", "deepspeed_env", "torch", "preflight", "blueprint", "accelerate", "kubernetes", "compose",
    "yaml", "python", "hf_model", "checkpoint", "megatron_checkpoint", "other",
]  # fmt: skip

_SCHEMAS: dict[str, Kind] = {
    "dslaunch.plan": "plan",
    "dslaunch.prediction": "prediction",
    "dslaunch.manifest": "manifest",
    "dslaunch.torch": "torch",
    "dslaunch.preflight": "preflight",
    "dslaunch.blueprint": "blueprint",
}
_DEEPSPEED_KEYS = frozenset({
    "activation_checkpointing", "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    "scheduler", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_optimization",
})  # fmt: skip
"""Keys of which a DeepSpeed configuration holds at least one, and other JSON files rarely."""
_SHARED_KEYS: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params"}), "scheduler": frozenset({"type", "params"}),
    "fp16": frozenset({"enabled"}), "bf16": frozenset({"enabled"}),
}  # fmt: skip
"""Those that other programs' files have as well, and what DeepSpeed's sections of that name hold."""
_FSDP_KEYS = frozenset({
    "auto_wrap_policy", "backward_prefetch", "cpu_ram_efficient_loading", "forward_prefetch", "limit_all_gathers",
    "min_num_params", "reshard_after_forward", "state_dict_type", "sync_module_states",
    "transformer_layer_cls_to_wrap", "use_orig_params", "xla_fsdp_settings", "xla_fsdp_v2",
})  # fmt: skip
"""Keys of the Trainer's fsdp_config, each also with `fsdp_` before it; activation_checkpointing is one too."""
_HF_KEYS = frozenset({
    "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "logging_steps", "save_steps",
    "lr_scheduler_type", "warmup_ratio", "gradient_checkpointing", "output_dir", "fp16", "bf16", "learning_rate",
    "gradient_accumulation_steps", "deepspeed", "report_to", "save_strategy", "max_steps", "remove_unused_columns",
    "warmup_steps",
})  # fmt: skip
"""Fields of TrainingArguments; a file of them holds at least three."""
_ACCELERATE_KEYS = frozenset({
    "distributed_type", "num_processes", "num_machines", "machine_rank", "compute_environment", "deepspeed_config",
    "fsdp_config", "main_training_function", "main_process_ip", "rdzv_backend", "same_network",
})  # fmt: skip
"""Keys of accelerate's configuration; one of its files holds at least two."""
_MODEL_KEYS = frozenset({
    "architectures", "hidden_size", "n_embd", "d_model", "text_config", "transformers_version",
})  # fmt: skip
"""Keys of a Hugging Face model's config.json; one of them stands beside model_type."""
_NEOX_KEYS = frozenset({
    "pipe_parallel_size", "model_parallel_size", "num_layers", "num_attention_heads", "max_position_embeddings",
    "seq_length",
})  # fmt: skip
"""Keys of GPT-NeoX's arguments, which hold DeepSpeed's among their own; a file of them has at least two."""
_DEEPSPEED_NAME = re.compile(
    r"(?:^|[_.-])(?:ds|deepspeed|zero_?[0-3])(?:[_.-]|$)|^zero(?:[_-]?(?:config|stage\w*))?$", re.IGNORECASE
)
_HF_NAME = re.compile(r"(?:hf|training|trainer)[_-]?arg", re.IGNORECASE)
_JSON_KEY = re.compile(r"[\"'](\w+)[\"']\s*:")
_YAML_KEY = re.compile(r"^(\w+):", re.MULTILINE)
_JSON_NAME = re.compile(r"\.h?json$", re.IGNORECASE)
_YAML_NAME = re.compile(r"\.ya?ml$", re.IGNORECASE)
_SHELL_NAME = re.compile(r"\.(?:sh|bash|sbatch|slurm|srun)$", re.IGNORECASE)
_TEMPLATE_NAME = re.compile(r"\.(?:j2|jinja2?|tmpl|tpl|template)$", re.IGNORECASE)
_TEMPLATE_LINE = re.compile(r"^(?:#SBATCH\s.*\{\{|\{%)", re.MULTILINE)
_PYTHON_FIRST_LINE = re.compile(r"#!.*python")
_PYTHON_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import )", re.MULTILINE)
_ENV_NAME = re.compile(r"^(?:env\.sh|.*\.env)$", re.IGNORECASE)
_PROSE = (".md", ".mdx", ".rst", ".patch", ".diff")
_DEEPSPEED_ENV = (".deepspeed_env", "ds_env")
_HOST_LINE = re.compile(r"\S+\s+\S*slots?\s*[=:]", re.IGNORECASE)
_ENV_LINE = re.compile(r"(?:export\s+)?[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|\S*)$")
_LAUNCH = re.compile(
    r"""^\s*(?:[A-Za-z_]\w*=\S*\s+)*                           # NAME=value in front
        (?:\S*/)?(?:deepspeed|torchrun|srun|mpirun|mpiexec|accelerate\s+launch|python[\d.]*)\s+
        (?:\S+\s+|\\\n\s*)*?(?:-m\s|\S+\.(?:py|sh)\b|-)""",
    re.VERBOSE | re.MULTILINE,
)
_RECORDS = 3
_NOTEBOOK = "# Databricks notebook source"
_LOOKED_AT = 20_000
"""Characters that a kind is told from, where the whole text would be searched."""


def looks_like_json(name: str, text: str) -> bool:
    """Worth parsing as JSON: it opens with a brace, or its name says so."""
    start = text.lstrip("\ufeff \t\r\n")[:2]
    opens = start[:1] == "{" and start not in ("{%", "{{") and not looks_like_yaml(name)
    return opens or _JSON_NAME.search(name) is not None


def looks_like_yaml(name: str) -> bool:
    """Whether the name says so; almost any text is some YAML."""
    return _YAML_NAME.search(name) is not None


def json_kind(name: str, value: Any) -> Kind:
    """The kind of a parsed JSON document; `value` is None where it could not be parsed."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, str) and schema.partition("/")[0] in _SCHEMAS:
        return _SCHEMAS[schema.partition("/")[0]]
    stem = name.rpartition("/")[2]
    if _is_hf_arguments(name, value) or _HF_NAME.search(stem):
        return "hf_arguments"
    if isinstance(value, dict) and isinstance(value.get("model_type"), str) and _MODEL_KEYS & value.keys():
        return "hf_model"
    if isinstance(value, dict) and len(_NEOX_KEYS.intersection(key.replace("-", "_") for key in value)) >= 2:
        return "json"
    if isinstance(value, dict) and len(_ACCELERATE_KEYS.intersection(value)) >= 2:
        return "accelerate"
    if isinstance(value, dict) and _is_of_fsdp(value):
        return "json"
    known = isinstance(value, dict) and _holds_deepspeed(value)
    return "deepspeed_json" if known or _DEEPSPEED_NAME.search(stem.rpartition(".")[0] or stem) else "json"


def _is_of_fsdp(value: dict[str, Any]) -> bool:
    """Whether it is what `fsdp_config` names: FSDP's keys, and of DeepSpeed's at most the one that both have."""
    others = _DEEPSPEED_KEYS.intersection(value) - {"activation_checkpointing"}
    return not others and any(key.removeprefix("fsdp_") in _FSDP_KEYS for key in value)


def _holds_deepspeed(value: dict[str, Any]) -> bool:
    """Whether keys are DeepSpeed's: of its own, or shared ones that are built as its sections or prevail."""
    found = _DEEPSPEED_KEYS.intersection(value)
    as_its_own = any(
        isinstance(value[key], dict) and parts <= value[key].keys()
        for key, parts in _SHARED_KEYS.items() if key in value
    )  # fmt: skip
    return bool(found - _SHARED_KEYS.keys()) or as_its_own or 2 * len(found) >= len(value) > 0


def meant_json(text: str) -> bool:
    """Whether a JSON that can't be read names a key of a kind that has rules."""
    return bool((_DEEPSPEED_KEYS | _HF_KEYS) & set(_JSON_KEY.findall(text[:_LOOKED_AT])))


def are_records(text: str) -> bool:
    """Whether each line is a document of its own: a log or data, and no configuration."""
    lines = [line for line in lines_of(text[:_LOOKED_AT]) if line.strip()][:_RECORDS]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), dict) for line in lines)
    except ValueError:
        return False


def yaml_kind(name: str, value: Any) -> Kind:
    """The kind of a parsed YAML document."""
    if isinstance(value, dict) and len(_ACCELERATE_KEYS.intersection(value)) >= 2:
        return "accelerate"
    if _is_hf_arguments(name, value):
        return "hf_arguments"
    if any(is_manifest(each) for each in (value if isinstance(value, list) else [value])):
        return "kubernetes"
    if isinstance(value, dict) and _has_services(value.get("services")):
        return "compose"
    return "accelerate" if name.rpartition("/")[2] == "accelerate.yaml" else "yaml"


def _has_services(value: Any) -> bool:
    """Whether it is what a compose file lists: services, each of an image."""
    every = value.values() if isinstance(value, dict) else ()
    return any(isinstance(each, dict) and {"image", "build"} & each.keys() for each in every)


def meant_yaml(text: str) -> bool:
    """Whether a YAML that can't be read is to be one of a kind that has rules, and no template of one."""
    keys = set(_YAML_KEY.findall(text[:_LOOKED_AT]))
    known = len(_ACCELERATE_KEYS & keys) >= 2 or len(_HF_KEYS & keys) >= 3 or {"apiVersion", "kind"} <= keys
    return known and "{{" not in text and "%{" not in text


def is_unnamed_yaml(name: str, text: str) -> bool:
    """Whether a text of another name holds the keys of a YAML that has rules; accelerate reads any name."""
    return not name.endswith(_PROSE) and meant_yaml(text)


def _is_hf_arguments(name: str, value: Any) -> bool:
    """A batch per device is said nowhere else; `fp16: true` is no section of DeepSpeed's."""
    if not isinstance(value, dict) or "zero_optimization" in value or _is_hydra(value):
        return False
    scalars = {key for key in _HF_KEYS.intersection(value) if not isinstance(value[key], dict)}
    if "per_device_train_batch_size" in value or {"output_dir", "deepspeed"} <= value.keys():
        return True
    if scalars and _HF_NAME.search(name.rpartition("/")[2]):
        return True
    return len(scalars) >= 3 and bool(scalars - _DEEPSPEED_KEYS)


def _is_hydra(value: dict[str, Any]) -> bool:
    """Whether Hydra composes the file, for a program with names and types of its own."""
    below = [value, *(each for each in value.values() if isinstance(each, dict))]
    return isinstance(value.get("defaults"), list) or "hydra" in value or any("_target_" in each for each in below)


def is_template(name: str, text: str) -> bool:
    """Whether a program of its own fills it in before anything reads it."""
    begins = text.lstrip()[:2] in ("{%", "{{")
    named = _TEMPLATE_NAME.search(name) is not None
    return begins or named or _TEMPLATE_LINE.search(text[:_LOOKED_AT]) is not None


_ONE_OPTION = re.compile(r"--(?!.*\s--)")
"""A line that begins with an option, and holds no other: of several it is a run's, in a list of runs."""


def text_kind(name: str, text: str) -> Kind:
    """The kind of a text that is neither JSON nor YAML."""
    stem = name.rpartition("/")[2]
    lines = [line.strip() for line in lines_of(text)]
    lines = [line for line in lines if line and not line.startswith("#")]
    if stem.endswith(_PROSE) or text.startswith(_NOTEBOOK):
        return "other"
    if stem in _DEEPSPEED_ENV:
        return "deepspeed_env"
    if _ENV_NAME.match(stem):
        return "env"
    if stem.endswith(".py") or _PYTHON_FIRST_LINE.match(text):
        return "python"
    if text.startswith("#!") or "#SBATCH" in text or _SHELL_NAME.search(stem):
        return "shell"
    if "hostfile" in stem.lower() or (lines and _HOST_LINE.match(lines[0])):
        return "hostfile"
    if stem == "megatron_args.txt" or (lines and all(_ONE_OPTION.match(line) for line in lines)):
        return "megatron_args"
    if lines and all(_ENV_LINE.match(line) for line in lines):
        return "env"
    if _LAUNCH.search(text[:_LOOKED_AT]):
        return "shell"
    return "python" if _PYTHON_LINE.search(text[:_LOOKED_AT]) else "other"
