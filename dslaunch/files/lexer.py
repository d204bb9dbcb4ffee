"""A shell's text cut into words and operators, as offsets into it. Nothing is filled in or run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_BLANK = re.compile(r"(?:[ \t\r]+|\\\r?\n|(?<=\s)\\[ \t]+(?:#.*\r?\n|\r?\n(?=[ \t]*-)))*")
"""Blanks and joined lines. One with a blank or a comment behind its backslash is read as meant; rules tell it."""
_OPERATOR = re.compile(r"\d*(?:&>>|&>|>>|>&|>\||<<<|<<-|<<|<&|<>|>|<)|&&|\|\||;;&?|;&|\|&|[;&|()]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_PROCESS = re.compile(r"[<>]\(")
_PLAIN = re.compile(r"[^\\'\"`$(){}\s;&|<>#]+")
_SINGLE = re.compile(r"[^']*'")
_ANSI_C = re.compile(r"(?:[^'\\]|\\.)*+'", re.DOTALL)
_INSIDE = re.compile(r"[^\\'\"`$(){}#]+")


@dataclass(frozen=True)
class Token:
    """A piece of the text from `start` up to `end`."""

    kind: Literal["word", "operator", "newline", "heredoc"]
    start: int
    end: int
    expands: bool = True
    """heredoc: the shell fills variables into it; its delimiter isn't quoted."""


class UnclosedError(Exception):
    """A quote or bracket that is not closed; `at` is the offset of the word it stands in."""

    def __init__(self, at: int) -> None:
        super().__init__("a quote or bracket that opens here is not closed")
        self.at = at


def tokens(text: str, start: int = 0, end: int | None = None) -> Iterator[Token]:
    """The tokens of text[start:end]; raises UnclosedError."""
    at, end = start, len(text) if end is None else end
    delimiters: list[str] = []
    awaits_delimiter = ""
    while (at := _blank_end(text, at, end)) < end:
        if text[at] == "\n":
            yield Token("newline", at, at + 1)
            at += 1
            for delimiter in delimiters:
                heredoc = _heredoc(text, at, end, delimiter)
                yield heredoc
                at = min(end, text.find("\n", heredoc.end) + 1 or end)
            delimiters = []
        elif text[at] == "#":
            at = _line_end(text, at, end)
        elif (match := _OPERATOR.match(text, at, end)) and not _PROCESS.match(text, at, end):
            yield Token("operator", at, match.end())
            awaits_delimiter = match[0] if match[0] in ("<<", "<<-") else ""
            at = match.end()
        else:
            stop = word_end(text, at, end)
            yield Token("word", at, stop)
            if awaits_delimiter:
                delimiters.append(awaits_delimiter[2:] + text[at:stop])
                awaits_delimiter = ""
            at = stop


def fields(text: str, start: int, end: int) -> Iterator[Token]:
    """The words of text[start:end] where only blanks and newlines part them: the value of a variable."""
    at = start
    while at < end:
        if text[at].isspace() or text.startswith("\\\n", at):
            at += 1 if text[at].isspace() else 2
        else:
            stop = word_end(text, at, end, operators=False)
            yield Token("word", at, stop)
            at = stop


def word_end(text: str, start: int, end: int, *, operators: bool = True) -> int:
    """The offset behind the word that begins at `start`; raises UnclosedError.

    Args:
        operators: `;`, `|`, `(` and the like end a word; otherwise only blanks do.
    """
    array = _ARRAY.match(text, start, end) or _PROCESS.match(text, start, end)
    at = array.end() if array else start
    opened = [")"] if array else []
    while at < end:
        match = (_INSIDE if opened else _PLAIN).match(text, at, end)
        at = match.end() if match else at
        if at >= end:
            break
        if not operators and text.startswith("\\$(", at) and ")" in text[at:end]:
            opened.append(")")  # for a shell inside
            at += 3
            continue
        char, top = text[at], opened[-1] if opened else ""
        if not opened and (char.isspace() or (operators and char in ";&|<>()")):
            return at
        at = _step(text, at, end, opened, top, start)
    if opened:
        raise UnclosedError(start)
    return end


def _step(text: str, at: int, end: int, opened: list[str], top: str, start: int) -> int:
    """Takes up the character at `at`, which may open or close something."""
    char = text[at]
    if char == "\\":
        return at + 2
    if char == "'" and top != '"' and not (top == "}" and '"' in opened):
        close = _SINGLE.match(text, at + 1, end) if text[at - 1] != "$" else _ANSI_C.match(text, at + 1, end)
        if close is None:
            raise UnclosedError(start)
        return close.end()
    if char == "#" and top == ")" and text[at - 1] in " \t\n(":
        return _line_end(text, at, end)
    if char == "#" and top == "`" and text[at - 1] in " \t\n`":
        behind = text.find("`", at, end)
        return min(_line_end(text, at, end), behind if behind >= 0 else end)
    if opened and char == top:
        opened.pop()
    elif char in "\"`":
        opened.append(char)
    elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
        opened.append(")" if text[at + 1] == "(" else "}")
        return at + 2
    elif char == "(" and top == ")":
        opened.append(")")
    return at + 1


def _heredoc(text: str, start: int, end: int, delimiter: str) -> Token:
    """The lines up to the one that is the delimiter; to the end where there is none."""
    strips = delimiter.startswith("-")
    raw = delimiter[1:] if strips else delimiter
    name = raw.strip("'\"").replace("\\", "")
    at = start
    while at < end:
        stop = _line_end(text, at, end)
        line = text[at:stop].rstrip("\r")
        if (line.lstrip("\t") if strips else line) == name:
            break
        at = min(end, stop + 1)
    return Token("heredoc", start, at, expands=raw == name)


def _blank_end(text: str, at: int, end: int) -> int:
    match = _BLANK.match(text, at, end)
    assert match is not None
    return match.end()


def _line_end(text: str, at: int, end: int) -> int:
    stop = text.find("\n", at, end)
    return end if stop < 0 else stop
