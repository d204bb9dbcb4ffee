"""A parser made from a catalogue of Megatron's arguments: types, choices and number of values."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from dslaunch.engines.megatron_catalogue import Argument, Catalogue

_TYPES = {"int": int, "float": float, "str": str}


def parser(catalogue: Catalogue) -> argparse.ArgumentParser:
    """The parser of the pretrain script, as far as the catalogue tells."""
    made = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for argument in dict.fromkeys(catalogue.arguments.values()):
        made.add_argument(*argument.flags, dest=argument.flags[0], **_options(argument))
    return made


def _options(argument: Argument) -> dict[str, Any]:
    if argument.nargs == "0":
        return {"action": "store_true"}
    number = int(argument.nargs) if argument.nargs.isdigit() else argument.nargs or None
    choices = argument.choices if argument.type in _TYPES or not argument.type else None
    return {"type": _TYPES.get(argument.type, str), "nargs": number, "choices": choices or None}


def parsed(text: str, catalogue: Catalogue) -> dict[str, Any]:
    """Flag -> value, of the flags that stand in a megatron_args.txt; each stands once."""
    lines = [shlex.split(line) for line in text.splitlines()]
    assert len({line[0] for line in lines}) == len(lines)
    values = vars(parser(catalogue).parse_args([word for line in lines for word in line]))
    return {line[0]: values[catalogue.arguments[line[0]].flags[0]] for line in lines}
