"""The keys of the configuration, as `dslaunch schema` and the reference print them."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dslaunch.conffiles import loaded
from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.paths import data_root
from dslaunch.review.lists import first_source
from dslaunch.schema.strategy import Strategy
from dslaunch.schema.validate import elsewhere, keys_of, models_at

_UNITS = {
    "gb_per_s": "GB/s (1e9), one way per GPU",
    "tflops": "1e12 FLOP/s, dense",
    "gib": "GiB (2**30 bytes)",
    "us": "microseconds",
    "minutes": "minutes",
    "s": "seconds",
    "hour": "USD",
    "days": "days",
    "tokens": "tokens",
    "seq_len": "tokens",
    "global_batch": "samples",
    "micro_batch": "samples",
    "steps": "optimizer steps",
    "bytes": "bytes",
}
"""By the end of a key."""


@dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    key: str
    type: str
    default: str
    """As it would be typed; `required` where there is none, empty where it is derived or a section."""
    unit: str
    """Empty where it has none, or its meaning says it."""
    meaning: str
    source: str
    """The file that sets the default, of conf/ where one does, and else of the schema."""


def schema_rows(dotted: str) -> list[tuple[str, ...]]:
    """(key, type, default, meaning) of each key of the section `dotted`, or of the one key."""
    rows: list[tuple[str, ...]] = []
    for title, keys in sections(dotted):
        rows += [(f"# {title}", "", "", "")] if title else []
        rows += [(each.key, each.type, each.default, each.meaning) for each in keys]
    return rows


def more_lines(dotted: str) -> list[str]:
    """Unit and source, for which the rows of a section have no room, where `dotted` is one key."""
    keys = [key for _, found in sections(dotted) for key in found if key.key == dotted]
    told = [(word, text) for key in keys for word, text in (("unit", key.unit), ("source", key.source)) if text]
    return [f"# {word}: {text}" for word, text in dict.fromkeys(told)]


def sections(dotted: str) -> list[tuple[str, list[Key]]]:
    """The keys of the section `dotted`, or the one key. Several sections, each with a title, where components
    differ by architecture.

    Raises:
        ConfigError: no such key.
    """
    typed = tuple(dotted.split(".")) if dotted else ()
    path = _real_path(typed)
    found = models_at(path)
    if found:
        return [
            (
                first_source(section.__doc__ or "", 200) if len(found) > 1 else "",
                [_key(".".join([*typed, key]), field, section) for key, field in keys_of(section).items()],
            )
            for section in found
        ]
    owners = models_at(path[:-1])
    if not owners and len(typed) > 1:  # a name inside a mapping, such as env.NAME
        return sections(".".join(typed[:-1]))
    keys = [_key(dotted, keys_of(owner)[path[-1]], owner) for owner in owners if path[-1] in keys_of(owner)]
    if not keys:
        known = list(dict.fromkeys(".".join([*typed[:-1], key]) for owner in owners for key in keys_of(owner)))
        meant = elsewhere(typed[-1]) or nearest(dotted, known)
        raise ConfigError(f"schema: no key '{dotted}'. There are {listed(known)}.{meant}")
    return [("", list(dict.fromkeys(keys)))]


def _real_path(typed: tuple[str, ...]) -> tuple[str, ...]:
    """`strategy.llm` is typed, `strategy.components.llm` is meant."""
    if len(typed) > 1 and typed[0] == "strategy" and typed[1] not in Strategy.model_fields:
        return (typed[0], "components", *typed[1:])
    return typed


def _key(key: str, field: FieldInfo, owner: type[BaseModel]) -> Key:
    kind = field.annotation
    section = isinstance(kind, type) and issubclass(kind, BaseModel)
    meaning = field.description or (first_source(kind.__doc__ or "", 200) if section else "")
    default, source = set_by_base().get(key, (_default(field), _module(owner)))
    return Key(key, _kind(kind), default, _unit(key), meaning.replace("\n", " "), source)


def _module(owner: type[BaseModel]) -> str:
    """The file of the schema that a section stands in: dslaunch/schema/training.py."""
    file = Path(str(sys.modules[owner.__module__].__file__))
    return "/".join(file.parts[-3:])


@cache
def set_by_base() -> dict[str, tuple[str, str]]:
    """Key -> (value, file) of what conf/base.yaml chooses."""
    root = data_root()
    choices = [choice for choice in loaded(root / "conf" / "base.yaml")["defaults"] if isinstance(choice, dict)]
    files = [(group, Path("conf") / group / f"{name}.yaml") for each in choices for group, name in each.items()]
    return {
        key: (value, file.as_posix())
        for group, file in files
        if (root / file).is_file()
        for key, value in _flat(group, loaded(root / file))
    }


def _flat(prefix: str, tree: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        yield prefix, str(tree)
        return
    for key, value in tree.items():
        yield from _flat(f"{prefix}.{key}", value)


def _unit(key: str) -> str:
    """What the end of a key says: 16 GiB for host_memory_gib."""
    last = key.rpartition(".")[2]
    return next((unit for end, unit in _UNITS.items() if last == end or last.endswith(f"_{end}")), "")


def _kind(annotation: Any) -> str:
    """An annotation as a user would say it: `int`, `a | b`, `NAME: section`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(args[0])
    if origin is typing.Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_kind(arg) for arg in args if arg is not type(None))
    if origin is dict:
        return f"{{NAME: {_kind(args[1])}}}"
    if origin is tuple:
        return f"[{', '.join(dict.fromkeys(_kind(arg) for arg in args if arg is not Ellipsis))}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "bool": "true | false"}.get(annotation.__name__, str(annotation.__name__))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel | dict) or value == ():
        return ""
    return (
        str(list(value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
