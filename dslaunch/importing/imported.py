"""What an import comes to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dslaunch.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Note:
    """Something of the source that has not become part of the result as it stands."""

    key: str
    """As the source names it."""
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def gathered(notes: Iterable[Note]) -> tuple[Note, ...]:
    """One note for all keys with the same reason, where the first of them stood."""
    keys: dict[str, list[str]] = {}
    for each in notes:
        keys.setdefault(each.reason, []).append(each.key)
    return tuple(Note(", ".join(named), reason) for reason, named in keys.items())


@dataclass(frozen=True)
class Imported:
    """Files for a site's folder, not written yet."""

    name: str
    files: Mapping[str, str]
    """Path in the site's folder -> text."""
    notes: tuple[Note, ...]
    """What was not carried over, and why, in the order of the source."""
    choices: tuple[str, ...] = ()
    """The groups' choices that the recipe makes, as group=choice; none where it is a model alone."""
    original: Mapping[str, Any] = field(default_factory=dict)
    """The source's own keys, dotted, with the value that a rendering should show again."""

    @property
    def planned_by(self) -> tuple[str, ...]:
        """Words that plan the recipe; none where it is a model alone."""
        return (f"recipe={self.name}", *self.choices) if self.choices else ()


def checked_name(name: str, source: str) -> str:
    """`name`, or one made from `source` (a path or Hub id).

    Raises:
        ConfigError: the name given is no file name that recipes and models can have.
    """
    if name:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--name {name}: a name holds letters, digits and _ . + -, and begins with a letter or digit"
            )
        return name
    made = re.sub(r"[^A-Za-z0-9.]+", "_", source).strip("_.").lower()
    return made or "imported"
