"""Whether `dslaunch explain --symptom` leads from what a program raised to a rule that tells it before."""

from __future__ import annotations

import re
from collections.abc import Collection

from dslaunch.rules.symptoms import matching

_WRITTEN = re.compile(r"(\w+)\((['\"])(.*?)(?:\2\)|$)", re.DOTALL)
_SAYS_NOTHING = (
    "AssertionError()", "ZeroDivisionError", "'NoneType' object has no attribute", "list index out of range",
    "FileNotFoundError(2, 'No such file or directory')",
    "object is not subscriptable", "object is not callable", "object is not iterable", "indices must be integers",
    "object has no attribute 'endswith'", "object has no attribute 'replace'",
)  # fmt: skip
"""Texts that fit any mistake in any program."""


def leads_to(raised: str, rules: Collection[str]) -> bool:
    """Whether the first answer to `raised`, an exception as repr writes it, names one of these rules."""
    match = _WRITTEN.match(raised)
    quote = "'" if raised.startswith("KeyError") else ""
    text = f"{match[1]}: {quote}{match[3]}{quote}" if match else raised
    first = [set(symptom.rules) for symptom in matching(text)[:1]]
    return any(each in raised for each in _SAYS_NOTHING) or any(each & set(rules) for each in first)
