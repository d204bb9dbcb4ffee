"""A DeepSpeed configuration, read as DeepSpeed reads it: what its parser would stop at is refused here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dslaunch.engines.deepspeed_keys import table
from dslaunch.errors import ConfigError
from dslaunch.files.fileset import File, read_paths
from dslaunch.rules.deepspeed.keytable import Entry, entries
from dslaunch.rules.deepspeed.values import allowed, expected, fits, in_range, shown

AUTO = "auto"
_MOST = 5
"""Mistakes that one message lists."""


def read_config(path: str) -> Mapping[str, Any]:
    """The configuration in the file.

    Raises:
        ConfigError: no JSON object, an empty one, a key given twice, or values of a wrong type or range.
    """
    (file,) = read_paths([Path(path)]).files
    if file.problems:
        problem = file.problems[0]
        raise ConfigError(
            f"{path}:{problem.at.line}:{problem.at.column}: {problem.message}. Give a DeepSpeed configuration."
        )
    if not isinstance(file.value, dict):
        raise ConfigError(f"{path}: no JSON object. Give a DeepSpeed configuration.")
    if not table().sections[""].keys.keys() & file.value.keys():
        raise ConfigError(f"{path}: holds none of DeepSpeed's keys. Give a DeepSpeed configuration.")
    wrong = [message for entry in entries(file) if (message := _mistake(file, entry))]
    if wrong:
        more = f"\nand {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise ConfigError("\n".join(wrong[:_MOST]) + more + "\nMend the file, and import it again.")
    return file.value


def _mistake(file: File, entry: Entry) -> str:
    """What is wrong with one value; empty where it is in order, or `auto`, which others fill in."""
    key = entry.key
    if key is None or key.removed or entry.shadowed or entry.value == AUTO:
        return ""
    place = f"{file.name}:{file.at(*entry.path).line}: {'.'.join(entry.path)} is {shown(entry.value)}"
    if not fits(entry, key):
        return f"{place}: {expected(key)} belongs there."
    return "" if in_range(key, entry.value) else f"{place}. Allowed: {allowed(key)}."


def flattened(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty section is a leaf."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
