"""The arguments that Megatron's pretrain scripts take, by version, as data read from their parsers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from dslaunch.engines.deepspeed_keys import release


@dataclass(frozen=True)
class Argument:
    """One argument of a parser, alike in all versions from `since` to `until`."""

    flags: tuple[str, ...]
    kind: str
    """Store | StoreTrue | StoreFalse | BooleanOptional"""
    type: str
    """int | float | str | ...; empty where the parser converts nothing."""
    nargs: str
    """Empty for one value; 0 for none, a number, `*` or `+`."""
    choices: tuple[Any, ...]
    since: str
    """The first version that has it so."""
    until: str
    """The last version that has it so."""

    def holds_for(self, version: str) -> bool:
        """Whether that version has it so."""
        return release(self.since) <= release(version) <= release(self.until)


@dataclass(frozen=True)
class Catalogue:
    """The arguments of one version."""

    framework: str
    """As a message names it."""
    version: str
    arguments: Mapping[str, Argument]
    """By flag, with its dashes."""
    elsewhere: Mapping[str, tuple[Argument, ...]]
    """By flag, in all versions."""

    def others_with(self, flag: str) -> str:
        """Which other versions have `flag`, in words; empty where none has."""
        spans = [_span(argument) for argument in self.elsewhere.get(flag, ())]
        return " and ".join(dict.fromkeys(spans))


@lru_cache(maxsize=1)
def megatron_versions() -> tuple[str, ...]:
    """The versions of megatron-core that there is a catalogue of, oldest first."""
    return tuple(load_table("megatron_args.json")["versions"])


@lru_cache(maxsize=8)
def megatron_catalogue(version: str) -> Catalogue:
    """The arguments of Megatron-LM with megatron-core `version`, one of megatron_versions()."""
    data = load_table("megatron_args.json")
    return catalogue_of(f"Megatron-LM core {version}", version, data)


@lru_cache(maxsize=8)
def megatron_mimo_catalogue(version: str) -> Catalogue:
    """The same with the arguments that the example for several grids adds."""
    stock, added = megatron_catalogue(version), load_table("megatron_mimo_args.json")
    own = catalogue_of(stock.framework, version, added)
    return Catalogue(
        f"{stock.framework} (examples/mimo)",
        version,
        {**stock.arguments, **own.arguments},
        {**stock.elsewhere, **own.elsewhere},
    )


@lru_cache(maxsize=1)
def megatron_deepspeed_catalogue() -> Catalogue:
    """The arguments of Megatron-DeepSpeed, which has one line of development and no releases."""
    data = load_table("megatron_deepspeed_args.json")
    return catalogue_of("Megatron-DeepSpeed", data["versions"][-1], data)


def catalogue_of(framework: str, version: str, data: dict[str, Any]) -> Catalogue:
    """The arguments that `version` has, of a table whose rows say from when to when they hold."""
    order = {name: position for position, name in enumerate(data["versions"])}
    every = [_argument(entry, data["versions"]) for entry in data["arguments"]]
    by_flag: dict[str, list[Argument]] = {}
    for argument in every:
        for flag in argument.flags:
            by_flag.setdefault(flag, []).append(argument)
    now = order[version]
    there = [each for each in every if order[each.since] <= now <= order[each.until]]
    return Catalogue(
        framework,
        version,
        {flag: each for each in there for flag in each.flags},
        {flag: tuple(arguments) for flag, arguments in by_flag.items()},
    )


def _argument(entry: dict[str, Any], versions: list[str]) -> Argument:
    return Argument(
        flags=tuple(entry["flags"]),
        kind=entry["kind"],
        type=entry.get("type", ""),
        nargs=str(entry.get("nargs", "" if entry["kind"] == "Store" else 0)),
        choices=tuple(entry.get("choices", ())),
        since=entry.get("since", versions[0]),
        until=entry.get("until", versions[-1]),
    )


def _span(argument: Argument) -> str:
    return argument.since if argument.since == argument.until else f"{argument.since} to {argument.until}"


def load_table(name: str) -> Any:
    """A table of dslaunch/engines/data."""
    return json.loads(resources.files("dslaunch.engines").joinpath("data", name).read_text(encoding="utf-8"))
