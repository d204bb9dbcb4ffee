"""Changes of a file at positions, which keep its comments and layout; and what `check --fix` does with them."""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Iterable, Mapping

from dslaunch.files.fileset import File
from dslaunch.files.position import Lines, Path, Position
from dslaunch.files.relaxed_json import value_end
from dslaunch.rules.registry import Edit

_BARE = re.compile(r"[^ \t\r\n{}\[\],:\"']+")
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
_COLON = re.compile(r"\s*:\s*")
_COMMA = re.compile(r"[ \t]*,")
_COMMA_BEFORE = re.compile(r",\s*\Z")
_MARGIN = 200
"""Characters between a value and the brace that ends its object."""


def renamed(file: File, path: Path, new: str) -> Edit | None:
    """The key at `path` under another name, in the quotes it has; None where its text isn't found."""
    at, start = _start(file, path)
    old = _key_text(file.text, start)
    if at is None or not old:
        return None
    quote = old[0] if old[0] in "\"'" else ""
    return Edit(at, old, f"{quote}{new}{quote}")


def revalued(file: File, path: Path, new: object) -> Edit | None:
    """Another value for the key at `path` of a JSON file; None where its text isn't found."""
    at, start = _start(file, path)
    key = _key_text(file.text, start)
    colon = _COLON.match(file.text, start + len(key))
    if at is None or not key or colon is None:
        return None
    end = value_end(file.text, colon.end())
    value_at = file.places.position(colon.end())
    return Edit(value_at, file.text[colon.end() : end], json.dumps(new))


def deleted(file: File, path: Path) -> Edit | None:
    """The key at `path` of a JSON file taken out, with one comma; None where a comment is in the way."""
    at, start = _start(file, path)
    key = _key_text(file.text, start)
    colon = _COLON.match(file.text, start + len(key))
    if at is None or not key or colon is None:
        return None
    end = value_end(file.text, colon.end())
    if comma := _COMMA.match(file.text, end):
        return _without(file.text, start, comma.end())
    before = _COMMA_BEFORE.search(file.text, 0, start)
    return _without(file.text, before.start() if before else start, end)


def _without(text: str, start: int, end: int) -> Edit:
    """text[start:end] taken out; a line that is left empty goes with it."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    if line_end > 0 and not text[line_start:start].strip() and not text[end:line_end].strip():
        start, end = line_start, line_end + 1
    return Edit(Lines(text).position(start), text[start:end], "")


def _start(file: File, path: Path) -> tuple[Position | None, int]:
    """Where the key at `path` stands, as position and offset; None where it isn't there, or within a script."""
    at = None if file.inside else file.positions.get(path)
    return at, file.places.offset(at) if at else 0


def _key_text(text: str, start: int) -> str:
    match = _QUOTED.match(text, start) or _BARE.match(text, start)
    return match[0] if match else ""


def applied(text: str, edits: Iterable[Edit]) -> str:
    """The text with the edits made, but for those that overlap an earlier one; neighbours that go are one."""
    lines = Lines(text)
    placed = sorted({(lines.offset(edit.at), edit.old, edit.new) for edit in edits})
    spans: list[tuple[int, int, str]] = []
    for start, old, new in placed:
        assert text.startswith(old, start), (start, old)
        end = start + len(old)
        last_start, last_end, last_new = spans[-1] if spans else (0, -1, "")
        if start > last_end or (start == last_end and (new or last_new)):
            spans.append((start, end, new))
        elif not new and not last_new and end > last_end:
            spans[-1] = (_with_comma(text, last_start, end), end, "")
            while len(spans) > 1 and spans[-1][0] < spans[-2][1]:  # that comma is taken out with the key before
                spans.pop()
                spans[-1] = (_with_comma(text, spans[-1][0], end), end, "")
    parts: list[str] = []
    done = 0
    for start, end, new in spans:
        parts += [text[done:start], new]
        done = end
    return "".join([*parts, text[done:]])


def _with_comma(text: str, start: int, end: int) -> int:
    """Where what is taken out begins, if the comma before it would be left as the object's last."""
    before = _COMMA_BEFORE.search(text, 0, start)
    return before.start() if before and text[end : end + _MARGIN].lstrip().startswith("}") else start


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff of the files that differ."""
    text = ""
    for name in sorted(after):
        if before[name] != after[name]:
            old, new = (io.StringIO(each[name], newline="\n").readlines() for each in (before, after))
            text += "".join(_ended(line) for line in difflib.unified_diff(old, new, name, name))
    return text


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
