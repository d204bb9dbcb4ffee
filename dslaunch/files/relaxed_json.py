"""JSON as DeepSpeed reads it from a file, with the position of each key.

DeepSpeed hands a file to the hjson package (deepspeed/runtime/config.py, 0.19.8; hjson 3.1.0), so comments,
trailing or missing commas, unquoted keys and strings, single quotes and a root without braces are legal
there, and a float that is a whole number below 1e10 becomes an int (`5e8` is 500000000). This reader accepts
the same texts and yields the same values; a test holds it to hjson.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dslaunch.files.position import Lines, Path, Position, Problem

MAX_DEPTH = 100
"""Levels of nesting that are read; DeepSpeed's own configuration has four."""
MAX_VALUES = 50_000
"""Keys and items that are read; a plan of thousands of GPUs has some thousands."""

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_BARE_KEY = re.compile(r"([^ \t\r\n{}\[\],:]+)[ \t\r\n]*(?=:)")
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*$")
_BARE_END = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_EOL = re.compile(r"[\r\n]|\Z")
_CHUNK = re.compile(r"(?:[^'\"\\\x00-\x1f]++|\\['\"\\/bfnrt])*+")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_MAX_WORD = 400
"""Characters; longer text without quotes is neither a word nor a number (DeepSpeed's largest has 19 digits)."""
_WORDS = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Document:
    """A parsed text. `problems` holds repeated keys, of which the last one counts here."""

    value: Any
    positions: dict[Path, Position]
    """Of each key, and of each item of a list."""
    problems: tuple[Problem, ...] = ()


class JsonSyntaxError(Exception):
    """The text is not what hjson reads, or more than one reads."""

    def __init__(self, message: str, at: Position, rule: str = "file.syntax") -> None:
        super().__init__(message)
        self.problem = Problem(rule, message, at)


def parse(text: str) -> Document:
    """The document in `text`; raises JsonSyntaxError with the position of the mistake."""
    reader = _Reader(text)
    value = reader.root()
    return Document(value, reader.positions, tuple(reader.problems))


def value_end(text: str, start: int) -> int:
    """The offset behind the value that begins at `start` of a document that `parse` reads."""
    reader = _Reader(text, at=start)
    reader.value(())
    return len(text[: reader.at].rstrip()) if text[start] not in "\"'" else reader.at


@dataclass
class _Reader:
    text: str
    positions: dict[Path, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        self.lines = Lines(self.text)

    def fail(self, message: str, at: int | None = None) -> JsonSyntaxError:
        return JsonSyntaxError(message, self.lines.position(self.at if at is None else at))

    def skip(self) -> str:
        """Move over blanks and comments; the next character, or an empty string at the end."""
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.text.startswith("/*", self.at):
            raise self.fail("a comment /* is not closed")
        return self.text[self.at : self.at + 1]

    def root(self) -> Any:
        if self.text.startswith("\ufeff"):
            self.at = 1
        first = self.skip()
        if not first:
            return {}
        value = self.value(()) if first in "{[" else self.braceless()
        if self.skip():
            raise self.fail("text after the end of the document")
        return value

    def braceless(self) -> Any:
        start = self.at
        try:
            return self.members((), closing="")
        except JsonSyntaxError as error:
            self.at = start
            try:
                return self.value(())
            except JsonSyntaxError:
                raise error from None

    def value(self, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} levels")
        first = self.text[self.at : self.at + 1]
        if first == "{":
            self.at += 1
            return self.members(path, closing="}")
        if first == "[":
            self.at += 1
            return self.items(path)
        if self.text.startswith("'''", self.at):
            return self.multiline()
        if first in ('"', "'"):
            return self.string()
        return self.bare()

    def members(self, path: Path, closing: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        opened = self.at - 1
        char = self.skip()
        while char != closing:
            if not char:
                raise self.fail("the text ends inside an object that opens here", opened)
            start = self.at
            key = self.key()
            if self.skip() != ":":
                raise self.fail(f"':' is missing after the key {key!r}")
            self.at += 1
            self.skip()
            self.note(path, key, start, repeated=key in result)
            result[key] = self.value((*path, key))
            char = self.separator()
        self.at += len(closing)
        return result

    def note(self, path: Path, key: str, start: int, repeated: bool) -> None:
        position = self.lines.position(start)
        if repeated:
            first = self.positions[(*path, key)]
            message = f"the key '{key}' stands here again; the first is at line {first.line}"
            self.problems.append(Problem("file.duplicate-key", message, position))
        self.place((*path, key), position)

    def place(self, path: Path, position: Position) -> None:
        self.positions[path] = position
        if len(self.positions) + len(self.problems) > MAX_VALUES:
            raise JsonSyntaxError(f"more than {MAX_VALUES:,} values", position, "file.unread")

    def items(self, path: Path) -> list[Any]:
        result: list[Any] = []
        opened = self.at - 1
        char = self.skip()
        while char != "]":
            if not char:
                raise self.fail("the text ends inside a list that opens here", opened)
            item = (*path, len(result))
            self.place(item, self.lines.position(self.at))
            result.append(self.value(item))
            char = self.separator()
        self.at += 1
        return result

    def separator(self) -> str:
        """Move over one comma, which may be missing; the next character."""
        char = self.skip()
        if char != ",":
            return char
        self.at += 1
        return self.skip()

    def key(self) -> str:
        if self.text[self.at] in "\"'":
            return self.string()
        match = _BARE_KEY.match(self.text, self.at)
        if match is None:
            raise self.fail("expected a key and ':'")
        self.at = match.end()
        return match[1]

    def string(self) -> str:
        """A string in double or single quotes; `at` is on the opening one."""
        opened, quote = self.at, self.text[self.at]
        self.at += 1
        parts: list[str] = []
        while True:
            chunk = _CHUNK.match(self.text, self.at)
            assert chunk is not None
            parts.append(_ESCAPE.sub(lambda match: _ESCAPES[match[1]], chunk[0]))
            char = self.text[chunk.end() : chunk.end() + 1]
            self.at = chunk.end() + 1
            if not char:
                raise self.fail("this string is not closed", opened)
            if char == quote:
                return "".join(parts)
            if char == "\\":
                parts.append(self.escape(opened))
            elif char in "\"'":
                parts.append(char)
            else:
                raise self.fail("a string runs over the end of its line or holds a control character", opened)

    def escape(self, opened: int) -> str:
        """A \\u escape, or a pair of them; `at` is behind the backslash."""
        char = self.text[self.at : self.at + 1]
        if char != "u":
            raise self.fail(f"'\\{char}' is no escape of JSON", opened)
        code = self.hex4(self.at + 1, opened)
        self.at += 5
        if code & 0xFC00 == 0xD800 and self.text.startswith("\\u", self.at):
            low = self.hex4(self.at + 2, opened)
            if low & 0xFC00 == 0xDC00:
                self.at += 6
                return chr(0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00)))
        return chr(code)

    def hex4(self, at: int, opened: int) -> int:
        match = _HEX4.match(self.text, at)
        if match is None:
            raise self.fail("'\\u' needs four hexadecimal digits", opened)
        return int(match[0], 16)

    def multiline(self) -> str:
        """Text between ''' and ''', without the indentation of the opening quotes."""
        indent = self.at - (self.text.rfind("\n", 0, self.at) + 1)
        end = self.text.find("'''", self.at + 3)
        if end < 0:
            raise self.fail("this text in ''' is not closed")
        body = self.text[self.at + 3 : end].replace("\r", "")
        self.at = end + 3
        head, newline, rest = body.partition("\n")
        lines = rest.split("\n") if newline else []
        cut = [line[len(line[:indent]) - len(line[:indent].lstrip(" \t")) :] for line in lines]
        kept = cut if not head.strip(" \t") else [head.lstrip(" \t"), *cut]
        return "\n".join(kept).removesuffix("\n")

    def bare(self) -> Any:
        """A word, a number, or else text without quotes up to the end of the line."""
        start = self.at
        if self.text[start : start + 1] in "{}[],:":
            raise self.fail("expected a value")
        while True:
            match = _BARE_END.search(self.text, self.at)
            assert match is not None
            self.at = match.start()
            if self.at - start > _MAX_WORD:
                if self.text[start : self.at].lstrip("-").isdecimal():
                    raise self.fail("a number too long to read", start)
                return self.rest_of_line(start)
            word = self.text[start : self.at]
            if word.strip() in _WORDS:
                return _WORDS[word.strip()]
            number = _NUMBER.match(word)
            if number is not None:
                return self.number(number, start)
            if not match[0] or match[0] in "\r\n":
                return word.strip()
            self.at += 1

    def rest_of_line(self, start: int) -> str:
        match = _EOL.search(self.text, self.at)
        assert match is not None
        self.at = match.start()
        return self.text[start : self.at].strip()

    def number(self, match: re.Match[str], start: int) -> int | float:
        whole, fraction, exponent = match.groups()
        try:
            if not fraction and not exponent:
                return int(whole)
            value = float(whole + (fraction or "") + (exponent or ""))
            return int(value) if int(value) == value and abs(value) < 1e10 else value
        except (ValueError, OverflowError):
            raise self.fail("a number too long to read", start) from None
