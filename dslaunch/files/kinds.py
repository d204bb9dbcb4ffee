"""Which kind of file a text is: by what it holds; its name is a hint where that leaves a doubt."""

from __future__ import annotations

import re
from typing import Any, Literal

Kind = Literal[
    "deepspeed_json", "hf_arguments", "plan", "prediction", "manifest", "json", "hostfile", "megatron_args",
    "shell",
    "env", "torch", "accelerate", "other",
]  # fmt: skip

_SCHEMAS: dict[str, Kind] = {
    "dslaunch.plan": "plan",
    "dslaunch.prediction": "prediction",
    "dslaunch.manifest": "manifest",
    "dslaunch.torch": "torch",
}
_DEEPSPEED_KEYS = frozenset({
    "activation_checkpointing", "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    "scheduler", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_optimization",
})  # fmt: skip
"""Keys of which a DeepSpeed configuration holds at least one, and other JSON files rarely."""
_DEEPSPEED_NAME = re.compile(r"(?:^|[_.-])(?:ds|deepspeed|zero_?\d?)(?:[_.-]|$)", re.IGNORECASE)
_JSON_NAME = re.compile(r"\.h?json$", re.IGNORECASE)
_SHELL_NAME = re.compile(r"\.(?:sh|bash|sbatch|slurm)$", re.IGNORECASE)
_ENV_NAME = re.compile(r"^(?:env\.sh|ds_env|.*\.env|\.deepspeed_env)$", re.IGNORECASE)
_HOST_LINE = re.compile(r"\S+\s+\S*slots?\s*[=:]", re.IGNORECASE)
_ENV_LINE = re.compile(r"(?:export\s+)?[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|\S*)$")


def looks_like_json(name: str, text: str) -> bool:
    """Worth parsing as JSON: it opens with a brace, or its name says so."""
    return _JSON_NAME.search(name) is not None or text.lstrip("\ufeff \t\r\n").startswith("{")


def json_kind(name: str, value: Any) -> Kind:
    """The kind of a parsed JSON document; `value` is None where it could not be parsed."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, str) and schema.partition("/")[0] in _SCHEMAS:
        return _SCHEMAS[schema.partition("/")[0]]
    if isinstance(value, dict) and "per_device_train_batch_size" in value:
        return "hf_arguments"
    known = isinstance(value, dict) and not _DEEPSPEED_KEYS.isdisjoint(value)
    stem = name.rpartition("/")[2]
    return "deepspeed_json" if known or _DEEPSPEED_NAME.search(stem.rpartition(".")[0] or stem) else "json"


def text_kind(name: str, text: str) -> Kind:
    """The kind of a text that is no JSON."""
    stem = name.rpartition("/")[2]
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if stem == "accelerate.yaml":
        return "accelerate"
    if _ENV_NAME.match(stem):
        return "env"
    if text.startswith("#!") or "#SBATCH" in text or _SHELL_NAME.search(stem):
        return "shell"
    if "hostfile" in stem.lower() or (lines and _HOST_LINE.match(lines[0])):
        return "hostfile"
    if stem == "megatron_args.txt" or (lines and all(line.startswith("--") for line in lines)):
        return "megatron_args"
    return "env" if lines and all(_ENV_LINE.match(line) for line in lines) else "other"
