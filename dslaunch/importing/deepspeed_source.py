"""A DeepSpeed configuration while it is read: which keys were taken, and which are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.deepspeed_file import AUTO, flattened
from dslaunch.importing.imported import Note

_AUTO_REASON = "auto: Hugging Face's Trainer fills it in; the plan counts on its own value"


class Source:
    """The configuration's keys, dotted; each is taken once, and what is left goes to engine.extra."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self.path = path
        self.left = dict(flattened(config))
        self.notes: list[Note] = []

    def take(self, *keys: str) -> Any:
        """The value of the first key that is there; None where none is, or where it is `auto`."""
        found = None
        for key in keys:
            if key in self.left:
                value = self.left.pop(key)
                if value == AUTO:
                    self.note_auto(key)
                elif found is None:
                    found = value
        return found

    def real(self, key: str) -> float | None:
        """A number of a `params` section, which no parser of DeepSpeed's checks; None as `take` has it.

        Raises:
            ConfigError: no number. Text that Python reads as one passes, as it does in DeepSpeed ("1e-4").
        """
        value = self.take(key)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.path}: {key} is {value!r}: a number belongs there.") from None

    def whole(self, key: str) -> int | None:
        """A count of a `params` section; raises ConfigError as `real` does."""
        value = self.real(key)
        if value is not None and value != int(value):
            raise ConfigError(f"{self.path}: {key} is {value}: a whole number belongs there.")
        return None if value is None else int(value)

    def note_auto(self, key: str) -> None:
        """A key that is `auto`."""
        self.note(key, _AUTO_REASON)

    def note(self, key: str, reason: str) -> None:
        """Something that is not carried over as it stands."""
        self.notes.append(Note(key, reason))

    def under(self, section: str) -> list[str]:
        """Keys left of a section."""
        return [key for key in self.left if key.startswith(f"{section}.")]
