"""A DeepSpeed JSON key by key, each with what the key table says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dslaunch.engines.deepspeed_keys import Key, Section, table
from dslaunch.files.fileset import File


@dataclass(frozen=True)
class Entry:
    """One key of a file, and what the table says of it."""

    path: tuple[str, ...]
    value: Any
    section: Section
    key: Key | None
    """None for a key that the section doesn't have."""
    shadowed: bool = False
    """The same setting stands beside it under its documented name, and DeepSpeed reads that one alone."""
    unread: bool = False
    """What it is read with (`Key.beside`) isn't there."""


def entries(file: File) -> Iterator[Entry]:
    """Each key of a DeepSpeed JSON down to where the table ends, in the order of the file."""
    if isinstance(file.value, dict):
        yield from _entries(table().sections[""], (), file.value)


def _entries(section: Section, path: tuple[str, ...], value: dict[str, Any]) -> Iterator[Entry]:
    for name, item in value.items():
        key = section.keys.get(name)
        here = (*path, name)
        shadowed = key is not None and section.parser == "raw" and value.get(key.alias_of) is not None
        beside = value.get(key.beside) if key is not None and key.beside else True
        unread = beside in (None, False) or (key is not None and key.walked and not beside)
        yield Entry(here, item, section, key, shadowed, unread)
        if key is not None and key.type == "section" and isinstance(item, dict) and not shadowed:
            yield from _entries(table().sections[section.below(key)], here, item)
