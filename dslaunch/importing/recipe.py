"""A recipe as it is put together: groups, keys, and what the user adds as KEY=VALUE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

import yaml

from dslaunch.errors import ConfigError
from dslaunch.importing.imported import Note, gathered
from dslaunch.importing.writing import yaml_text
from dslaunch.schema.text import is_text

GROUPS = ("model", "cluster", "strategy", "engine", "goal", "launcher", "training", "profile")
_SIZED = re.compile(r"(\d+)x(?:(\d+)x)?[A-Za-z].*")
_ORDER = (
    "name", "about", "script", "module", "script_args", "training", "strategy", "data", "checkpoint", "engine",
    "launcher", "env",
)  # fmt: skip


@dataclass
class Recipe:
    """Filled key by key; `text` writes it."""

    name: str
    about: str
    groups: dict[str, str] = field(default_factory=dict)
    """Group -> choice."""
    tree: dict[str, Any] = field(default_factory=dict)

    def put(self, dotted: str, value: Any) -> None:
        """Sets the key, its sections made as needed; a key that is there already stays: it is the user's."""
        *sections, last = dotted.split(".")
        place = self.tree
        for section in sections:
            place = place.setdefault(section, {})
        place.setdefault(last, value)

    def get(self, dotted: str) -> Any:
        """The value at the key, or None."""
        place: Any = self.tree
        for key in dotted.split("."):
            place = place.get(key) if isinstance(place, Mapping) else None
        return place

    @property
    def choices(self) -> tuple[str, ...]:
        """The groups' choices as words of a command line."""
        return tuple(f"{group}={choice}" for group, choice in self.groups.items())

    @property
    def gpus(self) -> int | None:
        """GPUs that the cluster's name counts; None where it counts none."""
        match = _SIZED.fullmatch(self.groups.get("cluster", ""))
        return int(match[1]) * int(match[2] or 1) if match else None

    def text(self, notes: Sequence[Note], head: Sequence[str]) -> str:
        """The YAML file, with what was not carried over in its head."""
        comments = list(head)
        if notes:
            comments += ["Not carried over as it stands:", *_wrapped(gathered(notes))]
        overrides = [{f"override {group}": choice} for group, choice in self.groups.items()]
        keys = {"name": self.name, "about": self.about, **self.tree}
        ordered = {key: keys[key] for key in sorted(keys, key=_position)}
        return yaml_text({"defaults": ["base", *overrides, "_self_"], **ordered}, comments)


def _wrapped(notes: Sequence[Note]) -> Iterator[str]:
    for note in notes:
        yield from wrap(str(note), 108, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _position(key: str) -> int:
    return _ORDER.index(key) if key in _ORDER else len(_ORDER)


def begun(name: str, about: str, words: Sequence[str], script_arguments: Sequence[str] = ()) -> Recipe:
    """A recipe with the user's words in it: group=choice and key=value; of a key given twice, the last.

    Raises:
        ConfigError: a word that is no KEY=VALUE, or a value that is no YAML.
    """
    recipe = Recipe(name, about)
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise ConfigError(f"'{word}' is not KEY=VALUE. Words for the recipe look like model=llama3_8b.")
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    for key, value in given.items():
        if key in GROUPS:
            recipe.groups[key] = value
        else:
            recipe.put(key, _value(key, value))
    if script_arguments:
        recipe.put("script_args", list(script_arguments))
    return recipe


def _value(key: str, text: str) -> Any:
    if is_text(tuple(key.split("."))):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={text}: can't be read. Lists are written [1,2].") from error
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 1e-5 for text
        except ValueError:
            return value
    return value


def require(recipe: Recipe, *keys: str, source: str, cluster: str = "8xH100") -> None:
    """Raises ConfigError where a group or key that the source cannot tell was not given; all are named at once.

    Args:
        cluster: the example for a cluster's name.
    """
    missing = [k for k in keys if k not in recipe.groups and recipe.get(k) is None]
    if missing:
        examples = {**_EXAMPLES, "cluster": cluster}
        shown = " ".join(f"{key}={examples[key]}" for key in missing)
        raise ConfigError(f"{source}: does not say {', '.join(missing)}. Add it, such as: {shown}")


_EXAMPLES = {
    "model": "llama3_8b",
    "training.seq_len": "4096",
    "training.global_batch": "128",
    "model.components.llm.vocab": "32000",
}
