"""What engine.extra takes: the renderer's own judgement of one key."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.deepspeed_keys import newest
from dslaunch.engines.megatron_catalogue import (
    Catalogue,
    megatron_catalogue,
    megatron_deepspeed_catalogue,
    megatron_versions,
)
from dslaunch.engines.registry import ENGINES
from dslaunch.errors import ConfigError, listed
from dslaunch.render.extra import merge_deepspeed
from dslaunch.render.megatron_flags import merge_extra


def deepspeed_refusal(nested: dict[str, Any], version: str) -> str:
    """Why a key of a DeepSpeed configuration, in its sections, is not taken; empty where it is.

    Args:
        version: of DeepSpeed; the newest where it is empty.
    """
    try:
        merge_deepspeed({}, nested, version or newest())
    except ConfigError as error:
        return _reason(error, " Allowed beside it")
    return ""


def megatron_arguments(engine: str, version: str) -> Catalogue:
    """The arguments of the engine's program; raises ConfigError for a version that is not known."""
    if engine == "megatron_deepspeed":
        return megatron_deepspeed_catalogue()
    if version not in megatron_versions():
        raise ConfigError(f"engine.version is {version!r}; known are {listed(megatron_versions())}")
    return megatron_catalogue(version)


def megatron_value(flag: str, values: tuple[str, ...], catalogue: Catalogue) -> Any:
    """What engine.extra gets for the words of an argument line.

    Raises:
        ConfigError: the flag is not taken, or not with these values; the message is the reason alone.
    """
    name = flag.removeprefix("--")
    argument = catalogue.arguments.get(flag)
    convert: Any = {"int": int, "float": float}.get(argument.type if argument else "", str)
    try:
        typed = [convert(value) for value in values]
        value: Any = True if not typed else typed[0] if len(typed) == 1 else typed
        merge_extra({}, {name: value}, catalogue)
    except ValueError as error:
        raise ConfigError(_reason(error, " Write a flag without")) from error
    return value


def default_megatron() -> str:
    """The version of Megatron that a recipe without engine.version is rendered for."""
    return ENGINES["megatron"].versions[0]


def _reason(error: Exception, tail: str) -> str:
    """The message without the key that it begins with, and without its general advice."""
    text = str(error)
    return (text.partition(": ")[2] or text).partition(tail)[0]
