"""Sections of the DeepSpeed JSON that newer versions no longer have, as those that read them judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit

_NEEDS = ("min_difficulty", "max_difficulty", "schedule_type")
_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "custom": (),
}
"""What each schedule's `schedule_config` must hold."""


@config_rule(
    "data.legacy-curriculum", severity="error", raised_by="deepspeed.initialize", since="0.16.9",
    until="0.19.7",
    evidence="deepspeed/runtime/data_pipeline/curriculum_scheduler.py 0.16.9 and 0.19.6, 0.18.0 run",
)  # fmt: skip
def legacy_curriculum(config: Config) -> Iterator[Hit]:
    """The section curriculum_learning without what its schedule needs."""
    section = config.get("curriculum_learning")
    if not isinstance(section, dict) or not config.on("curriculum_learning.enabled"):
        return
    missing = [name for name in _NEEDS if name not in section]
    if missing:
        message = f"curriculum_learning has no {', '.join(missing)}: AssertionError."
        yield config.hit("curriculum_learning", message, f"Give {', '.join(missing)}.")
        return
    kind, details = section["schedule_type"], section.get("schedule_config")
    if kind not in _SCHEDULES:
        message = f"schedule_type is {shown(kind)}: RuntimeError, Unsupported curriculum schedule type."
        yield config.hit("curriculum_learning.schedule_type", message, f"Write one of {', '.join(_SCHEDULES)}.")
        return
    held = details if isinstance(details, dict) else {}
    if absent := [name for name in _SCHEDULES[kind] if name not in held]:
        message = f"schedule_config has no {', '.join(absent)}, which {kind} needs: AssertionError."
        yield config.hit("curriculum_learning.schedule_config", message, f"Give {', '.join(absent)}.")
        return
    steps, levels = held.get("max_step"), held.get("difficulty")
    if kind != "fixed_discrete" or not isinstance(steps, list) or not isinstance(levels, list):
        return
    if not steps or len(levels) != len(steps) + 1:
        message = f"difficulty has {len(levels)} values and max_step {len(steps)}: AssertionError."
        fix = "Give two difficulties or more, and max_step for all but the last."
        yield config.hit("curriculum_learning.schedule_config", message, fix)


_TECHNIQUES: Mapping[str, tuple[str, ...]] = {
    "weight_quantization": ("start_bits", "target_bits"), "activation_quantization": ("bits",),
    "sparse_pruning": ("dense_ratio",), "row_pruning": ("dense_ratio",), "head_pruning": ("dense_ratio",),
    "channel_pruning": ("dense_ratio",),
}  # fmt: skip
"""What the params of each group must hold."""
_WORDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("weight_quantization", "quantization_type"): ("symmetric", "asymmetric"),
    ("weight_quantization", "rounding"): ("nearest", "stochastic"),
    ("activation_quantization", "quantization_type"): ("symmetric", "asymmetric"),
    ("activation_quantization", "range_calibration"): ("dynamic", "static"),
    ("sparse_pruning", "method"): ("l1", "topk", "snip_momentum"),
    **{(name, "method"): ("l1", "topk") for name in ("row_pruning", "head_pruning", "channel_pruning")},
}
"""Words of shared_parameters."""


@config_rule(
    "compression.groups", severity="error", raised_by="DeepSpeedConfig", since="0.16.9", until="0.19.6",
    evidence="deepspeed/compression/config.py 0.16.9 and 0.19.6, 0.18.0 run",
)  # fmt: skip
def compression(config: Config) -> Iterator[Hit]:
    """A technique of compression_training whose groups or shared parameters aren't complete."""
    for name, needs in _TECHNIQUES.items():
        key = f"compression_training.{name}"
        section = config.get(key)
        if not isinstance(section, dict):
            continue
        shared, groups = section.get("shared_parameters"), section.get("different_groups")
        yield from _shared(config, key, name, shared if isinstance(shared, dict) else {})
        if "different_groups" not in section:
            message = f"{name} has no different_groups: DeepSpeed raises."
            yield config.hit(key, message, "Give it, {} if there are none.")
        for group, held in groups.items() if isinstance(groups, dict) else ():
            yield from _group(config, f"{key}.different_groups", str(group), held, needs)


def _shared(config: Config, key: str, name: str, shared: Mapping[str, Any]) -> Iterator[Hit]:
    for (technique, word), known in _WORDS.items():
        if technique == name and word in shared and shared[word] not in known:
            message = f"{word} is {shown(shared[word])}: AssertionError."
            yield config.hit(f"{key}.shared_parameters.{word}", message, f"Use {' or '.join(known)}.")
    if name == "head_pruning" and shared.get("enabled") and "num_heads" not in shared:
        message = "head_pruning is enabled without num_heads: AssertionError."
        yield config.hit(f"{key}.shared_parameters", message, "Give the model's number of heads.")


def _group(config: Config, key: str, group: str, held: object, needs: tuple[str, ...]) -> Iterator[Hit]:
    params = held.get("params", {}) if isinstance(held, dict) else None
    missing = [need for need in needs if isinstance(params, dict) and need not in params]
    if missing and "." not in group:
        message = f"the group {group} has no {', '.join(missing)} in params: DeepSpeed raises."
        yield config.hit(f"{key}.{group}", message, f"Give {', '.join(missing)}.")
