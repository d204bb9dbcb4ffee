"""f-strings of Python 3.12 and newer (PEP 701), for an older one that is to read the rest of the file.

There the expressions in braces may hold the quotes of the string itself, backslashes, comments and line ends.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_QUOTE = re.compile(r"([A-Za-z]*)('''|\"\"\"|'|\")")
_PREFIXES = frozenset({"", "r", "b", "u", "br", "rb", "f", "fr", "rf"})
_OPENS, _CLOSES = "([{", ")]}"


class _NoStringError(Exception):
    """A string doesn't end where Python 3.12 wants it to."""


def downgraded(text: str) -> str | None:
    """`text` with each f-string that only 3.12 reads as one that older ones read, at the same places.

    None where there is none, or the text isn't understood here either.
    """
    pieces, end = [], 0
    try:
        for start, stop in _f_strings(text):
            if not _parses(text[start:stop]):
                pieces += [text[end:start], _older(text[start:stop])]
                end = stop
    except (_NoStringError, RecursionError):
        return None
    return "".join([*pieces, text[end:]]) if pieces else None


def _parses(expression: str) -> bool:
    try:
        ast.parse(f"({expression}\n)")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _older(literal: str) -> str:
    """The same with other quotes inside where these do, else a text without its fields; as long, line by line."""
    prefix, quote = _opening(literal, 0)
    start, stop = len(prefix) + len(quote), len(literal) - len(quote)
    other = {'"': "'", "'": '"'}.get(quote, "")
    inner = literal[start:stop]
    if other and other not in inner and "\n" not in inner and _parses(
        turned := literal[:start] + inner.replace(quote, other) + literal[stop:]
    ):
        return turned
    lines = literal.split("\n")
    lines = [" " * (len(line) - 1) + "\\" for line in lines[:-1]] + [" " * len(lines[-1])]
    return '""' + lines[0][2:] + "".join(f"\n{line}" for line in lines[1:])


def _opening(text: str, at: int) -> tuple[str, str]:
    found = _QUOTE.match(text, at)
    assert found
    return found[1], found[2]


def _f_strings(text: str) -> Iterator[tuple[int, int]]:
    """Where the outer ones begin and end."""
    at = 0
    while at < len(text):
        stop = _string_end(text, at)
        if stop is not None:
            if "f" in _opening(text, at)[0].lower():
                yield at, stop
            at = stop
        else:
            at = _next(text, at)


def _next(text: str, at: int) -> int:
    """Behind a comment, a name, or one character."""
    if text[at] == "#":
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    name = re.compile(r"\w+").match(text, at)
    return name.end() if name else at + 1


def _string_end(text: str, at: int) -> int | None:
    """Behind the string that begins at `at`; None where none does."""
    found = _QUOTE.match(text, at)
    if found is None or found[1].lower() not in _PREFIXES:
        return None
    at, quote, formatted = found.end(), found[2], "f" in found[1].lower()
    while not text.startswith(quote, at):
        if at >= len(text) or (len(quote) == 1 and text[at] == "\n"):
            raise _NoStringError
        if formatted and text.startswith(("{{", "}}"), at):
            at += 2
        elif formatted and text[at] == "{":
            at = _field_end(text, at + 1, quote)
        else:
            at += 2 if text[at] == "\\" else 1
    return at + len(quote)


def _field_end(text: str, at: int, quote: str) -> int:
    """Behind the brace that ends a field."""
    depth = 0
    while at < len(text):
        stop = _string_end(text, at)
        if stop is not None:
            at = stop
        elif text[at] == "}" and not depth:
            return at + 1
        elif text[at] == ":" and not depth and text[at + 1 : at + 2] != "=":
            return _spec_end(text, at + 1, quote)
        else:
            depth += (text[at] in _OPENS) - (text[at] in _CLOSES)
            at = _next(text, at)
    raise _NoStringError


def _spec_end(text: str, at: int, quote: str) -> int:
    """Behind the brace that ends a field with a format."""
    while at < len(text) and not text.startswith(quote, at):
        if text[at] == "}":
            return at + 1
        at = _field_end(text, at + 1, quote) if text[at] == "{" else at + 1
    raise _NoStringError
