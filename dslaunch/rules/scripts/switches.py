"""Arguments of a script that are meant as yes or no."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_NO = frozenset({"0", "false", "n", "no", "none", "off"})


@rule(
    "script.bool-argument", severity="wrong", raised_by="nobody",
    evidence="python/cpython:Lib/argparse.py 3.11 to 3.13, run",
)  # fmt: skip
def bool_argument(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An argument with type=bool: argparse makes True of every text but the empty one."""
    given: dict[tuple[str, str], str] = {}
    for file, command, script in launched(files):
        for flag in command.arguments.flags:
            if len(flag.values) != 1 or flag.values[0].lower() not in _NO:
                continue
            for _, names in _switches(script):
                if flag.name in names:
                    given[script.path, names[0]] = flag.name
                    message = f"{flag.name} {flag.values[0]} is true: bool() of any text but the empty one is."
                    yield Hit(file.name, flag.at, message, _FIX)
    for script in scripts(files):
        for call, names in _switches(script):
            if (script.path, names[0]) not in given:
                message = f"{names[0]} False will be true: bool() of any text but the empty one is."
                yield replace(script.hit(call, message, _FIX), severity="info")


_FIX = 'Write action="store_true", or action=argparse.BooleanOptionalAction.'


def _switches(script: Script) -> Iterator[tuple[Call, list[str]]]:
    for call in script.methods("add_argument"):
        kind = call.keyword("type")
        names = [name for name in map(script.constant, call.node.args) if isinstance(name, str)]
        if kind is not None and script.name(kind) == "bool" and names and names[0].startswith("-"):
            yield call, names
