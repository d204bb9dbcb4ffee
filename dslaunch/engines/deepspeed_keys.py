"""The keys of DeepSpeed's configuration by section and version: data/deepspeed_keys.json, typed.

Rendering and rules read this one table. Tests hold it to DeepSpeed's own models, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


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
    zero: bool = True
    """Whether 0 is taken."""
    range_since: str = ""
    """The first version that checks the range; empty: each."""
    since: str = ""
    """The first version that has it; empty: each version of the table has it."""
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
    ignored: str = ""
    """What decides instead, where DeepSpeed takes the key and never reads it."""
    beside: str = ""
    """The key of the same section without which, or where it is false, DeepSpeed doesn't read this one."""
    pipeline: bool = False
    """Read by DeepSpeed's pipeline engine alone."""
    auto: bool = False
    """`auto` is a value of DeepSpeed's own here."""
    empty: bool = False
    """What Python takes for false counts as an empty section."""
    walked: bool = False
    """The parser goes through the value: it refuses what isn't made of texts, whether or not the key is read."""
    asked: str = ""
    """A section that is asked for this key alone: a text or a list without it is passed over."""

    def lacks(self, version: str) -> bool:
        """Whether the key came after `version`."""
        return bool(self.since) and release(version) < release(self.since)

    def gone(self, version: str) -> bool:
        """Whether the key's presence raises in `version`."""
        return bool(self.removed) and release(self.removed) <= release(version)


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

    def below(self, key: Key) -> str:
        """The path of the section that `key`, one of this section's, holds."""
        return key.section_of or ".".join(filter(None, (self.path, key.name)))


@dataclass(frozen=True)
class KeyTable:
    """The versions, oldest first, and the sections by dotted path; the root's is empty."""

    versions: tuple[str, ...]
    sections: dict[str, Section]

    def homes(self, name: str) -> list[str]:
        """Paths of the sections that have a key of this name."""
        return [path for path, section in self.sections.items() if name in section.keys]

    def key(self, path: Sequence[str]) -> Key:
        """The key at `path`, each part but the last a section."""
        return self.sections[".".join(path[:-1])].keys[path[-1]]


@cache
def table() -> KeyTable:
    """The table, read once."""
    source = resources.files("dslaunch.engines").joinpath("data", "deepspeed_keys.json")
    data = json.loads(source.read_text(encoding="utf-8"))
    sections = {path: _section(path, raw) for path, raw in data["sections"].items()}
    return KeyTable(tuple(data["versions"]), sections)


def newest() -> str:
    """The version that is rendered for where none is named, and whose parser the table was held to."""
    return table().versions[-1]


@cache
def release(version: str) -> tuple[int, ...]:
    """`0.19.8` as (0, 19, 8): compares as versions do."""
    return tuple(int(part) for part in version.split("."))


def rejects_unknown(section: Section, version: str) -> bool:
    """Whether this DeepSpeed refuses a key that the section doesn't have, instead of ignoring it."""
    return section.unknown == "rejected" and release(section.rejects_since or "0") <= release(version)


def _section(path: str, raw: dict[str, Any]) -> Section:
    keys = {name: _key(name, fields) for name, fields in raw["keys"].items()}
    return Section(path, raw["unknown"], raw["parser"], raw["evidence"], raw.get("rejects_since", ""), keys)


def _key(name: str, fields: dict[str, Any]) -> Key:
    return Key(name, **{**fields, "choices": tuple(fields.get("choices", ()))})
