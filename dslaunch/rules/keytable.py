"""The keys of DeepSpeed's configuration by section and version: tables/deepspeed_keys.json, typed.

A test holds the sections that pydantic reads to DeepSpeed's own models, field by field. `absent` and `since`
are neighbours among the versions that were looked at: between them the key's arrival isn't known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dslaunch.files.fileset import File


@dataclass(frozen=True)
class Key:
    """One key of one section."""

    name: str
    type: str
    """bool | int | plain_int (no text) | float | str | list | list[str] | dict | section | dtype | none | any,
    or two of them with |."""
    null: bool = False
    choices: tuple[str | int, ...] = ()
    fold: bool = False
    """Upper and lower case are the same among the choices."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    range_since: str = ""
    """The first version known to check the range; empty: each."""
    absent: str = ""
    """The last version known to lack the key; empty: each version of the table has it."""
    since: str = ""
    """The first version known to have it."""
    until: str = ""
    """The last version that takes it."""
    removed: str = ""
    """The first version that raises where the key stands."""
    alias_of: str = ""
    """The other name of the same setting, which DeepSpeed documents."""
    section_of: str = ""
    """The section's path in the table, where it isn't the key's own."""
    deprecated: str = ""
    """What replaces it."""
    exclusive: bool = False
    """Key and replacement together raise."""
    wrong: str = "silent"
    """A wrong type outside pydantic: rejected by the parser, later (engine or first step), or silent."""
    moved_to: str = ""
    """What to use now, for a removed key."""
    auto: bool = False
    """`auto` is a value of DeepSpeed's own here."""


@dataclass(frozen=True)
class Section:
    """One object of the configuration."""

    path: str
    unknown: str
    """rejected | ignored: what happens to a key that isn't listed."""
    parser: str
    """pydantic: types and ranges are checked; raw: values are taken as they are."""
    evidence: str
    rejects_since: str
    """The first version known to reject unknown keys; empty: each."""
    keys: dict[str, Key]


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


@dataclass(frozen=True)
class KeyTable:
    """Versions looked at, oldest first, and the sections by dotted path; the root's is empty."""

    versions: tuple[str, ...]
    sections: dict[str, Section]

    def homes(self, name: str) -> list[str]:
        """Paths of the sections that have a key of this name."""
        return [path for path, section in self.sections.items() if name in section.keys]


@cache
def table() -> KeyTable:
    """The table, read once."""
    text = (resources.files("dslaunch.rules") / "tables" / "deepspeed_keys.json").read_text(encoding="utf-8")
    data = json.loads(text)
    sections = {path: _section(path, raw) for path, raw in data["sections"].items()}
    return KeyTable(tuple(data["versions"]), sections)


def entries(file: File) -> Iterator[Entry]:
    """Each key of a DeepSpeed JSON down to where the table ends, in the order of the file."""
    if isinstance(file.value, dict):
        yield from _entries(table().sections[""], (), file.value)


def _entries(section: Section, path: tuple[str, ...], value: dict[str, Any]) -> Iterator[Entry]:
    for name, item in value.items():
        key = section.keys.get(name)
        here = (*path, name)
        shadowed = key is not None and section.parser == "raw" and value.get(key.alias_of) is not None
        yield Entry(here, item, section, key, shadowed)
        if key is not None and key.type == "section" and isinstance(item, dict) and not shadowed:
            below = key.section_of or ".".join(filter(None, (section.path, name)))
            yield from _entries(table().sections[below], here, item)


def _section(path: str, raw: dict[str, Any]) -> Section:
    keys = {name: _key(name, fields) for name, fields in raw["keys"].items()}
    return Section(path, raw["unknown"], raw["parser"], raw["evidence"], raw.get("rejects_since", ""), keys)


def _key(name: str, fields: dict[str, Any]) -> Key:
    return Key(name, **{**fields, "choices": tuple(fields.get("choices", ()))})
