"""Which keys the schema declares as text, so that they arrive as typed."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from dslaunch.schema.config import RunConfig


def is_text(path: tuple[str, ...]) -> bool:
    """Whether the value at `path` is declared as a string (not as one of a few words)."""
    return any(
        len(pattern) == len(path) and all(p in ("*", key) for p, key in zip(pattern, path, strict=True))
        for pattern in _text_patterns()
    )


@cache
def _text_patterns() -> frozenset[tuple[str, ...]]:
    return frozenset(_walk(RunConfig, ()))


def _walk(annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if annotation is str:
        yield path
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from _walk(field.annotation, (*path, field.alias or name))
        return
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _walk(args[0], path)
    elif origin is dict:
        yield from _walk(args[1], (*path, "*"))
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            yield from _walk(arg, path)
