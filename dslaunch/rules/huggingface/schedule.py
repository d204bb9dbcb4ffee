"""The Trainer's lr_scheduler_kwargs, against the schedule that lr_scheduler_type names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import configs
from dslaunch.rules.huggingface.trainer import Argument, runs_reading
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

SCHEDULES: Mapping[str, frozenset[str]] = {
    "linear": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate"}),
    "cosine_warmup_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"}),
    "warmup_stable_decay": frozenset({
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    }),
}  # fmt: skip
"""What the schedules take beside the steps and last_epoch (transformers 5.24.0); the constant ones get none."""
_SHAPES = ("linear", "cosine", "1-sqrt")
_LEAST = 1e-7
"""lr_end of `polynomial` where nothing is said."""
_OWN_LEAST = frozenset({
    "min_lr", "min_learning_rate", "min_lr_rate", "min_lr_ratio", "lr_min", "learning_rate_min",
})  # fmt: skip
"""Arguments that the Trainer doesn't have: the script that takes one writes it into lr_scheduler_kwargs."""
_RATE = 5e-5
"""learning_rate where nothing is said."""


@rule(
    "huggingface.schedule", severity="error", raised_by="transformers",
    evidence="huggingface/transformers:src/transformers/optimization.py get_scheduler 5.24.0, run",
)  # fmt: skip
def schedule(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """lr_scheduler_kwargs that the schedule doesn't take, or lacks."""
    for given, read in runs_reading(files, configs(plan, files, settings)):
        if not any(config.has("scheduler") for config in read):
            yield from _of_run(given)


def _keywords(value: Any) -> Any:
    """The section; TrainingArguments reads one that is written as text, where it begins so, as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    except ValueError:
        return value


def _of_run(given: Mapping[str, Argument]) -> Iterator[Hit]:
    named, section = given.get("lr_scheduler_type"), given.get("lr_scheduler_kwargs")
    name = str(named.value) if named else "linear"
    keywords = _keywords(section.value) if section else {}
    if name in SCHEDULES and isinstance(keywords, dict):
        yield from _unknown(name, keywords, section)
        at = section or named
        if at is not None:
            yield from _missing(name, keywords, at, given)


def _unknown(name: str, keywords: dict[str, Any], section: Argument | None) -> Iterator[Hit]:
    taken = SCHEDULES[name] | {"last_epoch"}
    for keyword in keywords if section else ():
        if keyword not in taken and section:
            message = f"lr_scheduler_kwargs: {name} takes no {keyword}, TypeError.{nearest(keyword, taken)}"
            fix = f"Use {listed(sorted(SCHEDULES[name]))}." if SCHEDULES[name] else "Take it out."
            yield Hit(section.name, section.at, message, fix)


def _missing(name: str, keywords: dict[str, Any], at: Argument, given: Mapping[str, Argument]) -> Iterator[Hit]:
    """What a schedule asks for, or can't have together."""
    if "min_lr_rate" in SCHEDULES[name]:
        told = [each for each in ("min_lr", "min_lr_rate") if keywords.get(each) is not None]
        if len(told) != 1 and not (_OWN_LEAST & given.keys()):
            message = f"{name} takes one of min_lr and min_lr_rate in lr_scheduler_kwargs, not {len(told)}."
            yield Hit(at.name, at.at, message, 'Write lr_scheduler_kwargs {"min_lr_rate": 0.1}.')
    if name == "warmup_stable_decay" and "num_decay_steps" not in keywords:
        message = "warmup_stable_decay without num_decay_steps in lr_scheduler_kwargs: TypeError."
        yield Hit(at.name, at.at, message, 'Write lr_scheduler_kwargs {"num_decay_steps": 1000}.')
    for keyword in ("warmup_type", "decay_type") if name == "warmup_stable_decay" else ():
        if keywords.get(keyword, "linear") not in _SHAPES:
            message = f"{keyword} is {keywords[keyword]!r} in lr_scheduler_kwargs: ValueError."
            yield Hit(at.name, at.at, message, f"Use {listed(_SHAPES)}.")
    end = keywords.get("lr_end", _LEAST)
    rate = given["learning_rate"].value if "learning_rate" in given else _RATE
    if name == "polynomial" and isinstance(end, int | float) and isinstance(rate, int | float) and end >= rate:
        message = f"polynomial ends at lr_end {end:g}, which isn't below learning_rate {rate:g}: ValueError."
        yield Hit(at.name, at.at, message, "Write a smaller lr_end into lr_scheduler_kwargs.")
