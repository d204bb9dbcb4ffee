"""Blocks of a shell script that have no end, or an end that belongs to none: where bash reads on, and stops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dslaunch.files.lexer import UnclosedError, tokens

_ENDS: Mapping[str, str] = {
    "case": "esac", "for": "done", "if": "fi", "select": "done", "until": "done", "while": "done", "{": "}",
}  # fmt: skip
_CLOSES = frozenset(_ENDS.values())
_GOES_ON = frozenset({"!", "do", "elif", "else", "then", "time"})
"""Words behind which a command begins."""
_REDIRECTS = re.compile(r"\d*[<>&]+[<>&|-]*")
_OTHER_SHELL = re.compile(
    r"(?:Content-Type:|MIME-Version:)|#!(?!\S*/(?:ba|da|k)?sh\b|\S*env\s+(?:-\S+\s+)*(?:ba|da|k)?sh\b)"
)


@dataclass
class _Block:
    """An open block; a case reads patterns from `in` and from each `;;` on, up to a `)`."""

    word: str
    at: int
    named: bool = False
    """The `in` of a case, or the `do` of a loop, was read."""
    pattern: bool = False


def fault(text: str) -> tuple[str, int] | None:
    """What is wrong with the script's blocks, and the offset of the word; None where nothing is told."""
    return None if _OTHER_SHELL.match(text) else _read(text)[0]


def ends(text: str) -> Mapping[int, int]:
    """Offsets of the words that open a block, and behind those that close it."""
    return _read(text)[1]


@lru_cache(maxsize=4)
def _read(text: str) -> tuple[tuple[str, int] | None, Mapping[int, int]]:
    """What is wrong, and the blocks up to there."""
    blocks = _Blocks(text)
    try:
        return blocks.read(), blocks.ends
    except UnclosedError:
        return None, blocks.ends


class _Blocks:
    """Goes through the tokens once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.open: list[_Block] = []
        self.ends: dict[int, int] = {}
        self.first = True
        """Whether a command may begin here."""
        self.names = False
        """Whether the next word is a function's name, behind which its block begins."""

        self.tested = False
        """Whether `]]` stands right before, behind which a brace closes a block."""
        self.parted = False
        """Whether `&` stands right before."""

    def read(self) -> tuple[str, int] | None:
        redirected = False
        for token in tokens(self.text):
            raw = self.text[token.start : token.end]
            if token.kind == "heredoc":
                continue
            if token.kind == "operator" and _REDIRECTS.fullmatch(raw) and raw not in ("&", "&&"):
                redirected = True
            elif token.kind == "word":
                if not redirected and (found := self._word(raw, token.start)):
                    return found
                redirected = False
            elif raw == ";" and self.parted:
                return "`;` behind `&`, which ends the command already: bash stops at it", token.start
            else:
                self._operator(raw)
                redirected = False
            self.parted = token.kind == "operator" and raw == "&"
        if not self.open:
            return None
        last = self.open[-1]
        message = f"`{last.word}` opens here and has no `{_ENDS[last.word]}`: bash stops at the end of the file"
        return message, last.at

    def _word(self, raw: str, at: int) -> tuple[str, int] | None:
        top = self.open[-1] if self.open else None
        if top is not None and top.pattern:
            if raw == "esac" and self.first:
                self._close(at + len(raw))
            self.first = False
            return None
        if top is not None and top.word == "case" and not top.named:
            top.named = top.pattern = self.first = raw == "in"
            return None
        if not self.first and not (raw == "}" and self.tested):
            self.first, self.names = self.names, False  # `function NAME {`
            self.tested = raw == "]]"
            return None
        if raw in _CLOSES:
            if top is None or _ENDS[top.word] != raw:
                return self._stray(raw, top), at
            self._close(at + len(raw))
        elif raw in _ENDS:
            if raw == "{" and top is not None and top.word in ("for", "select") and not top.named:
                self.open.pop()  # `for NAME; { ...; }`
            self.open.append(_Block(raw, at))
            self.first = raw not in ("case", "for", "select")
        elif raw == "function":
            self.first, self.names = False, True
        else:
            self.first = raw in _GOES_ON
            if raw == "do" and top is not None and top.word != "case":
                top.named = True
        return None

    def _close(self, at: int) -> None:
        self.ends[self.open.pop().at] = at
        self.first = True

    def _stray(self, raw: str, top: _Block | None) -> str:
        if top is None:
            return f"`{raw}` closes nothing here: bash stops at it"
        line = self.text.count("\n", 0, top.at) + 1
        return f"`{raw}`, and the `{top.word}` in line {line} has no `{_ENDS[top.word]}` yet: bash stops at it"

    def _operator(self, raw: str) -> None:
        top = self.open[-1] if self.open else None
        self.first = True
        if top is not None and top.word == "case" and top.named:
            if raw in (";;", ";&", ";;&"):
                top.pattern = True
            elif raw == ")":
                top.pattern = False
