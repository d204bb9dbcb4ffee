"""Places in a text that somebody, or a program that knows them, is to fill in before anything reads it."""

from __future__ import annotations

import re

_GAP = re.compile(
    r"<[A-Za-z][^<>]*>|\{\{?\s*[A-Za-z_][\w .-]*\}?\}|__[A-Z][A-Z0-9_]*__|#[A-Z][A-Z0-9_]*#|%[A-Z]{2}[A-Z0-9_]*%"
    r"|@[A-Z]{2}[A-Z0-9_]*@"
)


def is_gap(text: str) -> bool:
    """Whether `<nodes>`, `{nodes}`, `{{ nodes }}`, `__NODES__`, `#NODES#`, `%NODES%` or `@NODES@` stands in it."""
    return _GAP.search(text) is not None
