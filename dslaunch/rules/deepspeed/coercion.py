"""What pydantic (2.x, lax mode) takes for a type: DeepSpeed's models coerce `"2"`, `2.0` and `"yes"`.

Conversion table: docs.pydantic.dev/latest/concepts/conversion_table. A test runs every case against
DeepSpeed's own models.
"""

from __future__ import annotations

import math
import re
from typing import Any

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_INT_TEXT = re.compile(r"\s*[+-]?\d+(?:_\d+)*(?:\.0*)?\s*")


def coerces(kind: str, value: Any) -> bool:
    """Whether pydantic takes `value` for the type `kind` of the key table."""
    if "|" in kind:
        return any(coerces(part, value) for part in kind.split("|"))
    if kind == "bool":
        return value in (0, 1) if isinstance(value, int | float) else _is_bool_text(value)
    if kind == "int":
        return _is_int_text(value) if isinstance(value, str) else _is_whole(value)
    if kind == "plain_int":
        return _is_whole(value)
    if kind == "float":
        return number(value) is not None
    if kind.startswith("list["):
        return isinstance(value, list) and all(coerces(kind[5:-1], item) for item in value)
    plain = {"str": str, "list": list, "dict": dict, "section": dict, "any": object}
    return kind in plain and isinstance(value, plain[kind])


def number(value: Any) -> float | None:
    """`value` as pydantic makes a float of it, or None."""
    if not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_bool_text(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in _TRUE | _FALSE


def _is_int_text(value: str) -> bool:
    return _INT_TEXT.fullmatch(value) is not None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value == int(value))
