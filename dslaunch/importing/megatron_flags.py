"""Megatron's flags by name, each taken once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.imported import Note

KEYS = {
    "--data-path": "data.path",
    "--tokenizer-model": "data.tokenizer",
    "--save": "checkpoint.dir",
    "--load": "checkpoint.load",
    "--save-interval": "checkpoint.every",
    "--seq-length": "training.seq_len",
    "--micro-batch-size": "training.micro_batch",
    "--global-batch-size": "training.global_batch",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
    "--lr": "training.optimizer.lr",
    "--min-lr": "training.optimizer.min_lr",
    "--weight-decay": "training.optimizer.weight_decay",
}
"""The recipe's key for what a script most often takes from its caller."""


class Flags:
    """Values of the flags, as text; what nobody takes stays in `left`."""

    def __init__(self, words: Sequence[str], where: str) -> None:
        self.where = where
        self.given = dict(parsed(words))
        self.left = dict(self.given)
        self.notes: list[Note] = []

    def note(self, flag: str, reason: str) -> None:
        """Something that is not carried over as it stands."""
        self.notes.append(Note(flag, reason))

    def on(self, flag: str) -> bool:
        """Whether a flag without value is there."""
        return self.left.pop(flag, None) is not None

    def text(self, *flags: str) -> str | None:
        """The value of the first of `flags`, which mean the same."""
        values = [self.left.pop(flag) for flag in flags if flag in self.left]
        if not values:
            return None
        value = values[0]
        if value and value[0].startswith("<"):
            self.note(flags[0], f"{' '.join(value)}: a placeholder; {_given_by(flags[0])}")
            return None
        if any("$" in word or "`" in word for word in value):
            self.note(flags[0], f"{' '.join(value)}: nothing in the script sets it; {_given_by(flags[0])}")
            return None
        if len(value) != 1:
            raise ConfigError(f"{self.where}: {flags[0]} has {len(value)} values; it takes one.")
        return value[0]

    def peek(self, flag: str) -> int | None:
        """A whole number that stays to be taken; None where it is absent or no number."""
        value = self.given.get(flag, ("",))[0:1]
        return int(value[0]) if value and value[0].isdigit() else None

    def number(self, *flags: str) -> int | None:
        """A whole number; raises ConfigError where it is none."""
        value = self.text(*flags)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ConfigError(
                f"{self.where}: {flags[0]} is {value!r}; a whole number belongs there."
            ) from None

    def real(self, *flags: str) -> float | None:
        """A number; raises ConfigError where it is none."""
        value = self.text(*flags)
        try:
            return None if value is None else float(value)
        except ValueError:
            raise ConfigError(f"{self.where}: {flags[0]} is {value!r}; a number belongs there.") from None


def _given_by(flag: str) -> str:
    return f"give {KEYS[flag]}" if flag in KEYS else "give the key in the recipe"


def parsed(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag -> its values; the last one wins, as in argparse. Words before the first flag are passed over."""
    flags: dict[str, tuple[str, ...]] = {}
    current = ""
    for word in words:
        if word.startswith("--"):
            current, equals, value = word.partition("=")
            flags[current] = (value,) if equals else ()
        elif current:
            flags[current] = (*flags[current], word)
    return flags


def as_values(flags: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Flag -> True, its value, or its values."""
    return {k: True if not v else v[0] if len(v) == 1 else v for k, v in flags.items()}
