"""Tests and counters of a script that bash takes and that don't do what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.lexer import UnclosedError, tokens
from dslaunch.files.position import Lines
from dslaunch.files.script import Command
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_RAN = "bash 5.2, run"
_GLUED = re.compile(r"\[(?=[\"'$!-])\S+")
"""`[$X`, `["$X"`: the name of a command, which none has."""
_ALWAYS = re.compile(r"[^=!<>~-][^=!<>~]*(?:==|!=)[^=]*")
"""`a==b` as one word: a text that isn't empty."""
_ERREXIT = re.compile(
    r"^[ \t]*set[ \t]+(?P<sign>[-+])(?:\w*e|[^\n]*o[ \t]+errexit)|^#![^\n]*[ \t](?P<first>-)\w*e", re.MULTILINE
)
_FUNCTION = re.compile(r"^(?:function[ \t]+[\w.:-]+|[\w.:-]+[ \t]*\(\))|^(?P<end>\})", re.MULTILINE)
_COUNTS = re.compile(
    r"""(?P<whole>\(\(\s*(?P<name>[A-Za-z_]\w*)\s*(?P<does>\+\+|=\s*0)\s*\)\)
        |let\s+["']?(?P<let>[A-Za-z_]\w*)(?P<lets>\+\+|=0)["']?)[ \t]*(?=;|\#|\n|\Z)""",
    re.VERBOSE,
)
_BEGINS = re.compile(r"(?:^|[;{]|\b(?:do|then|else))[ \t]*\Z", re.MULTILINE)
"""What a command of its own stands behind; after `if`, `while` or `&&` a status of 1 ends nothing."""


_WRITES = re.compile(r"\[[ \t]+[^\]\[\n&|]*?[ \t]([<>])[ \t]*(\d+)[ \t]+\]")
"""`[ $N > 4 ]`, which makes a file named 4."""


@rule("shell.test", severity="wrong", raised_by="nobody", evidence=_RAN)
def broken_test(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A test in brackets that is none: it fails, or holds, whatever it asks."""
    for file, script in files.scripts():
        lines = file.places
        for command in script.commands:
            found = _fault(command)
            written = _WRITES.match(file.text, lines.offset(command.at))
            if written and not found:
                message = f"{written[1]} {written[2]} is a file, and no comparison: the test asks what is left."
                found = message, f"Write {'-gt' if written[1] == '>' else '-lt'}, or [[ ]] with words."
            if found:
                yield Hit(file.name, command.at, *found)


def _fault(command: Command) -> tuple[str, str] | None:
    """What bash makes of it, and the fix."""
    first, last = command.words[0].text, command.words[-1].text
    if _GLUED.fullmatch(first) and len(command.words) > 1 and last.endswith("]"):
        return f"{first} is no command: the test fails, whatever it asks.", "Write a blank behind the bracket."
    if first != "[" or any(word.text == "]" for word in command.words[:-1]):
        return None
    if last != "]":
        glued = last.endswith("]")
        fix = "Write a blank before ]." if glued else "Write [ A ] && [ B ], or [[ A && B ]]."
        return "`[: missing `]'`: the test fails, whatever it asks.", fix
    words = [word for word in command.words[1:-1] if word.text != "!"]
    if len(words) == 1 and _ALWAYS.fullmatch(words[0].text):
        message = f"[ {words[0].text} ] asks whether a text is empty: it always holds."
        return message, "Write blanks beside the sign."
    return None


@rule("shell.increment", severity="error", raised_by="nobody", evidence=_RAN)
def increment(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A counter that begins at 0, raised under `set -e` by a command whose status is then 1: the script ends."""
    for file, script in files.scripts():
        if not script.problems and _ERREXIT.search(file.text):
            yield from _counted(file)


def _counted(file: File) -> Iterator[Hit]:
    text = file.text
    begins = _outside(text)
    for found in _COUNTS.finditer(text):
        name = found["name"] or found["let"]
        before = text[: found.start()]
        if found.start() not in begins or not _BEGINS.search(before[-_NEAR:]) or not _ends_at_errors(before):
            continue
        counts = "=" not in (found["does"] or found["lets"])
        set_before = re.findall(rf"(?:^|[\s;])(?:local\s+|declare\s+-i\s+)?{name}=(\S*)", before)
        if not counts or (set_before and set_before[-1].strip("\"';") == "0"):
            value = "counts from 0" if counts else "is 0"
            message = f"{found['whole']} {value}, so its status is 1, and `set -e` ends the script here."
            at = Lines(text).position(found.start())
            fix = f"Write {name}=$(({name} + 1))." if counts else f"Write {name}=0."
            yield Hit(file.name, at, message, fix)


def _ends_at_errors(before: str) -> bool:
    """Whether `set -e` holds behind this text, outside of a function: one that `if` calls isn't ended."""
    switches = [found["sign"] or found["first"] for found in _ERREXIT.finditer(before)]
    blocks = [found["end"] for found in _FUNCTION.finditer(before)]
    return bool(switches) and switches[-1] == "-" and not (blocks and blocks[-1] is None)


_NEAR = 200
"""Characters before a command in which what it stands behind is looked for."""


def _outside(text: str) -> set[int]:
    """Where words and operators begin: not within quotes, comments or heredocs."""
    try:
        return {token.start for token in tokens(text) if token.kind in ("word", "operator")}
    except UnclosedError:
        return set()
