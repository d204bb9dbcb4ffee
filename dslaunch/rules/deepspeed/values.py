"""One value of a DeepSpeed JSON against its key in the table: type, range, and what DeepSpeed does."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_keys import Key
from dslaunch.files.position import dotted
from dslaunch.rules.deepspeed.coercion import coerces, number
from dslaunch.rules.deepspeed.keytable import Entry
from dslaunch.rules.registry import RaisedBy, Severity

HF_FILLED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
})  # fmt: skip
"""Where Hugging Face Trainer replaces `auto`: huggingface/transformers:src/transformers/integrations/deepspeed.py
(trainer_config_process, trainer_config_finalize) 5.24.0."""
ACCELERATE_FILLED = frozenset({
    "zero_optimization.stage", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
})  # fmt: skip
"""Where accelerate's plugin, which the Trainer uses too, replaces `auto` by its own setting or default:
huggingface/accelerate:src/accelerate/utils/dataclasses.py DeepSpeedPlugin 1.15.0, run."""

_WORDS = {
    "section": "an object", "dict": "an object", "int": "a whole number", "plain_int": "a whole number",
    "float": "a number", "bool": "true or false", "str": "text", "list": "a list", "list[str]": "a list of texts",
    "dtype": "a torch.dtype, which JSON can't hold (leave the key out)", "none": "nothing",
}  # fmt: skip


def is_placeholder(entry: Entry) -> bool:
    """`auto` that stands for a value to be filled in: pydantic drops it, Hugging Face replaces it."""
    if entry.value != "auto" or entry.key is None or entry.key.auto:
        return False
    return entry.section.parser == "pydantic" or dotted(entry.path) in HF_FILLED


def fits(entry: Entry, key: Key) -> bool:
    """Whether the parser takes the value for the key's type (pydantic), or nothing can go wrong with it (raw)."""
    value = entry.value
    if value is None:
        return key.null or key.type == "any"
    if (key.auto and value == "auto") or (entry.path == ("zero_optimization",) and isinstance(value, bool)):
        return True
    if entry.section.parser == "pydantic":
        return coerces(key.type, value)
    return any(_is(kind, value) for kind in key.type.split("|"))


def effect_of_type(entry: Entry, key: Key) -> tuple[Severity | None, RaisedBy | None, str]:
    """Severity and who raises, where they differ from the rule's own, and what DeepSpeed does in words."""
    if entry.section.parser == "pydantic":
        return None, None, "refuses the file (ValidationError)"
    if entry.unread and (not key.walked or _is_walked(entry.value)):
        return "wrong", "nobody", f"doesn't look at it without {key.beside}"
    if key.walked and _is_walked(entry.value):
        if any("." not in each for each in entry.value):
            return None, "deepspeed.initialize", "fails when the engine is built, at its first letter or key"
        return "wrong", "nobody", "takes what keys it has"
    if _is_passed_over(key, entry.value):
        return "wrong", "nobody", "passes over it"
    if key.type == "section" or (key.wrong == "rejected" and not _computes(key, entry.value)):
        return None, None, "fails at start-up (TypeError or AttributeError)"
    if key.wrong == "later" and not _computes(key, entry.value):
        return None, "deepspeed.initialize", "raises when the engine starts or takes its first step"
    if key.type == "bool" and entry.value:
        return "wrong", "nobody", "checks nothing: it counts as true"
    return "wrong", "nobody", "checks nothing: it goes on with this value"


def effect_of_range(entry: Entry, key: Key) -> tuple[Severity | None, RaisedBy | None, str]:
    """As effect_of_type, for a value of the right type outside its range."""
    if entry.section.parser == "pydantic" or key.wrong == "rejected":
        return None, None, "DeepSpeed refuses it at start-up"
    if entry.unread:
        return "wrong", "nobody", f"DeepSpeed doesn't look at it without {key.beside}"
    if key.wrong == "later" and (key.choices or not key.zero):
        return None, "deepspeed.initialize", "DeepSpeed raises when the engine is built or takes its first steps"
    return "wrong", "nobody", "DeepSpeed doesn't check it at start-up"


def in_range(key: Key, value: Any) -> bool:
    """Whether a value of the right type is one of the choices, or within the bounds."""
    if value is None or (key.auto and value == "auto"):
        return True
    if key.choices:
        return _is_choice(key, value)
    size = number(value)
    if size is None:
        return True
    return (
        (key.ge is None or size >= key.ge)
        and (key.gt is None or size > key.gt)
        and (key.le is None or size <= key.le)
        and (key.lt is None or size < key.lt)
        and (key.zero or size != 0)
    )


def expected(key: Key) -> str:
    """The key's type in words."""
    kinds = " or ".join(_WORDS.get(kind, kind) for kind in key.type.split("|"))
    return f"{kinds} or null" if key.null else kinds


def allowed(key: Key) -> str:
    """The key's choices or bounds in words."""
    if key.choices:
        return " | ".join(str(choice) for choice in key.choices)
    bounds = [("at least", key.ge), ("more than", key.gt), ("at most", key.le), ("less than", key.lt)]
    limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    return limits or "any number but 0"


def is_text(value: object) -> bool:
    """Whether a number, or one of a list, is written as text; `auto` is another matter."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and each != "auto" for each in values)


def shown(value: Any) -> str:
    """A value in a message: as JSON writes it, cut."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is(kind: str, value: Any) -> bool:
    """Whether `value` is of this type as it stands, with nothing converted."""
    if kind == "bool":
        return isinstance(value, int) and value in (0, 1)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return coerces(kind, value)


def _is_walked(value: Any) -> bool:
    """Whether Python goes through the value text by text: a text's letters, an object's keys."""
    return isinstance(value, str | dict)


def _is_passed_over(key: Key, value: Any) -> bool:
    """Whether DeepSpeed finds nothing to read where a section should stand, and goes on."""
    if key.empty and not value:
        return True
    return bool(key.asked) and isinstance(value, str | list) and key.asked not in value


def _computes(key: Key, value: Any) -> bool:
    """Whether Python computes with `value` as with the key's own type, though it means something else."""
    numbers = {"bool": int, "int": int | float, "float": int | float}
    return key.type in numbers and isinstance(value, numbers[key.type]) and in_range(key, value)


def _is_choice(key: Key, value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    if key.type in ("int", "bool"):
        return all(number(item) in key.choices for item in items)
    if key.fold:
        return all(str(item).lower() in {str(choice).lower() for choice in key.choices} for item in items)
    return all(item in key.choices for item in items)
