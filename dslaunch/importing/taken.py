"""What engine.extra takes: the renderer's own judgement of one key."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.catalogue import megatron_arguments, megatron_versions
from dslaunch.engines.deepspeed_keys import newest
from dslaunch.errors import ConfigError
from dslaunch.render.extra import merge_deepspeed, merge_megatron


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


def megatron_value(flag: str, values: tuple[str, ...], version: str) -> Any:
    """What engine.extra gets for the words of an argument line.

    Raises:
        ConfigError: the flag is not taken, or not with these values; the message is the reason alone.
    """
    name = flag.removeprefix("--")
    argument = megatron_arguments(version).get(flag)
    convert: Any = {"int": int, "float": float}.get(argument.type if argument else "", str)
    try:
        typed = [convert(value) for value in values]
        value: Any = True if not typed else typed[0] if len(typed) == 1 else typed
        merge_megatron({}, {name: value}, version)
    except ValueError as error:
        raise ConfigError(_reason(error, " Write a flag without")) from error
    return value


def newest_megatron() -> str:
    """The newest version that there is a catalogue of."""
    return megatron_versions()[-1]


def _reason(error: Exception, tail: str) -> str:
    """The message without the key that it begins with, and without its general advice."""
    text = str(error)
    return (text.partition(": ")[2] or text).partition(tail)[0]
