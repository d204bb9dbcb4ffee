"""Which of the Python files a command starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.rules.scripts.tree import Script, scripts


def launched(files: FileSet) -> Iterator[tuple[File, CommandLine, Script]]:
    """Commands whose script is one of the files, with the file they stand in."""
    pythons = list(scripts(files))
    for file, command in files.launches() if pythons else ():
        script = _started(command, pythons)
        if script is not None:
            yield file, command, script


def started(files: FileSet, command: CommandLine) -> Script | None:
    """The script that a command starts; None where it isn't among the files, or several may be meant."""
    return _started(command, list(scripts(files)))


def reads_json_itself(files: FileSet, command: CommandLine) -> bool:
    """Whether a command starts a script that calls deepspeed.initialize, and no Trainer trains it."""
    script = started(files, command)
    return script is not None and bool(script.deepspeed) and not script.by_framework


def _started(command: CommandLine, pythons: list[Script]) -> Script | None:
    if command.script is None:
        return None
    path = command.script.text
    wanted = PurePosixPath(path.replace(".", "/") + ".py" if command.module else path)
    if not is_told(wanted.name):
        return None
    found = [each for each in pythons if PurePosixPath(each.path).name == wanted.name]
    if len(found) > 1:
        found = [each for each in found if _ends_alike(PurePosixPath(each.path), wanted)]
    return found[0] if len(found) == 1 else None


def _ends_alike(path: PurePosixPath, wanted: PurePosixPath) -> bool:
    """Whether one path is the end of the other, as far as both are written out."""
    told = [part for part in wanted.parts if is_told(part) and part not in (".", "/")]
    size = min(len(path.parts), len(told))
    return path.parts[-size:] == tuple(told[-size:])
