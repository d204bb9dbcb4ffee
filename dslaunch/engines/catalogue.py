"""What Megatron takes: its arguments by version, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from dslaunch.errors import ConfigError, listed

_MEGATRON = "megatron_args_"


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
