"""What the frameworks take: DeepSpeed's configuration keys and Megatron's arguments, by version, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from dslaunch.errors import ConfigError, listed

_MEGATRON = "megatron_args_"


@dataclass(frozen=True)
class Key:
    """One key of a DeepSpeed configuration."""

    type: str = ""
    """As DeepSpeed declares it; empty where it declares none."""
    values: tuple[Any, ...] = ()
    """The values allowed, where they are few."""
    alias: str = ""
    """Another name that DeepSpeed takes for it."""
    deprecated: str = ""
    """What replaces it, where it is deprecated."""
    unknown: str = ""
    """What happens to a key that is not among `keys`: forbid (error) | ignore (silently) | any (accepted)."""
    section: bool = False
    """Holds keys of its own, though not all of them need be known."""
    keys: Mapping[str, Key] = field(default_factory=dict)
    """The known keys of a section."""

    def find(self, name: str) -> Key | None:
        """The key `name` of this section, by its name or alias."""
        return self.keys.get(name) or next((key for key in self.keys.values() if key.alias == name), None)


@dataclass(frozen=True)
class DeepSpeedKeys:
    """The configuration keys of one version of DeepSpeed."""

    version: str
    top: Key
    removed: Mapping[str, str]
    """Key (dotted) -> what DeepSpeed says of it; its mere presence raises."""


@dataclass(frozen=True)
class Argument:
    """One argument of Megatron's parser."""

    flags: tuple[str, ...]
    kind: str
    """Store | StoreTrue | StoreFalse | BooleanOptional"""
    type: str
    """int | float | str | ...; empty where the parser converts nothing."""
    nargs: str
    """Empty for one value; 0 for none, a number, `*` or `+`."""
    choices: tuple[Any, ...]


@lru_cache(maxsize=1)
def deepspeed_keys() -> DeepSpeedKeys:
    """The keys of DeepSpeed 0.19.8."""
    data = _load("deepspeed_keys.json")
    top = _key({"keys": data["keys"], "unknown": data["unknown_top_level"]}, "")
    return DeepSpeedKeys(data["version"], top, data["removed"])


def _key(data: dict[str, Any], inherited: str) -> Key:
    unknown = data.get("unknown", inherited)
    return Key(
        type=data.get("type", ""),
        values=tuple(data.get("values", ())),
        alias=data.get("alias", ""),
        deprecated=data.get("deprecated", ""),
        unknown=unknown,
        section="keys" in data,
        keys={name: _key(item, unknown) for name, item in data.get("keys", {}).items()},
    )


@lru_cache(maxsize=8)
def megatron_arguments(version: str) -> dict[str, Argument]:
    """Flag (with its dashes) -> argument, of Megatron-LM with megatron-core `version`.

    Raises:
        ConfigError: there is no catalogue of that version.
    """
    series = ".".join(version.split(".")[:2])
    try:
        data = _load(f"{_MEGATRON}{series}.json")
    except FileNotFoundError:
        raise ConfigError(
            f"engine.version is {version!r}, but the arguments of that Megatron are not known; "
            f"known are {listed(megatron_versions())}. Set engine.version to one of these"
        ) from None
    return {flag: _argument(entry) for entry in data for flag in entry["flags"]}


def megatron_versions() -> list[str]:
    """The versions of megatron-core that there is a catalogue of."""
    names = [item.name for item in resources.files("dslaunch.engines").joinpath("data").iterdir()]
    stems = [name.removesuffix(".json") for name in names if name.startswith(_MEGATRON)]
    return sorted(stem.removeprefix(_MEGATRON) for stem in stems)


def _argument(entry: dict[str, Any]) -> Argument:
    return Argument(
        flags=tuple(entry["flags"]),
        kind=entry["kind"],
        type=entry.get("type", ""),
        nargs=str(entry.get("nargs", "")),
        choices=tuple(entry.get("choices", ())),
    )


def _load(name: str) -> Any:
    return json.loads(resources.files("dslaunch.engines").joinpath("data", name).read_text(encoding="utf-8"))
