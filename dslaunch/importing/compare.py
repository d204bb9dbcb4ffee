"""The original's keys beside what was rendered from its import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.engines.deepspeed_keys import Section, table
from dslaunch.files import megatron
from dslaunch.importing.deepspeed_file import flattened


@dataclass(frozen=True)
class Row:
    """One key of the original."""

    key: str
    original: Any
    rendered: Any
    """None where the rendering has not got it."""
    same: bool


def compared(original: Mapping[str, Any], rendered: Mapping[str, Any]) -> tuple[Row, ...]:
    """Each of the original's dotted keys; a switch that is off is the same as one that is absent."""
    rows = []
    for key, value in original.items():
        found = rendered.get(key, rendered.get(_documented(key)))
        off = value is False and found is None
        rows.append(Row(key, value, found, off or _equal(value, found)))
    return tuple(rows)


def _documented(dotted: str) -> str:
    """A key of DeepSpeed's under the name that it documents: bf16.enabled for bfloat16.enabled."""
    section: Section | None = table().sections[""]
    names = []
    for part in dotted.split("."):
        key = section.keys.get(part) if section else None
        names.append(key.alias_of or part if key else part)
        section = table().sections.get(section.below(key)) if section and key else None
    return ".".join(names)


def keys_of(files: Mapping[str, str]) -> dict[str, Any]:
    """What was rendered, as the sources name it: DeepSpeed's keys, Megatron's flags, accelerate's launch keys."""
    keys: dict[str, Any] = _launch_keys(json.loads(files["plan.json"])) if "plan.json" in files else {}
    if "ds_config.json" in files:
        keys |= flattened(json.loads(files["ds_config.json"]))
    if "megatron_args.txt" in files:
        keys |= {
            flag.name: _flag_value(flag.values) for flag in megatron.parse(files["megatron_args.txt"]).flags
        }
    return keys


def _launch_keys(plan: Mapping[str, Any]) -> dict[str, Any]:
    precision = plan["training"]["precision"]
    kind = {"zero": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_GPU"}[plan["engine"]["sharding"]]
    return {
        "num_processes": plan["world_size"],
        "num_machines": plan["cluster"]["nodes"],
        "mixed_precision": "no" if precision == "fp32" else precision,
        "distributed_type": "NO" if kind == "MULTI_GPU" and plan["world_size"] == 1 else kind,
    }


def _flag_value(values: tuple[str, ...]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values


def _equal(first: Any, second: Any) -> bool:
    """Equal as values: 1, 1.0 and the text "1" of an argument line are."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, bool) or isinstance(second, bool) or first is None or second is None:
        return first is second
    try:
        return float(first) == float(second)
    except (TypeError, ValueError):
        return bool(first == second)
