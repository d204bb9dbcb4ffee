"""Files that a command names, where the folder that they would be in was read as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from dslaunch.errors import nearest
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments, is_told
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.keys import is_slip
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_MOVES = frozenset({"cd", "popd", "pushd"})
_MOVED = ("--chdir", "-D", "--wd", "--workdir", "--work-dir")
_READ = ("--deepspeed", "--deepspeed_config", "--deepspeed-config", "--config_file", "--hostfile", "-H")
"""Options whose value is a file that is read at start-up."""
_SUFFIXES = (".json", ".py", ".yaml", ".yml")


@rule(
    "launcher.absent-file", severity="error", raised_by="python",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/config.py, launcher/runner.py fetch_hostfile 0.19.8, run; "
    "pytorch/pytorch:torch/distributed/run.py 2.13, run; huggingface/accelerate:src/accelerate/commands/launch.py",
)  # fmt: skip
def absent(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file that a command names isn't in the folder, and another that it names, or may mean, is."""
    for file, command in files.launches() if files.folders else ():
        folder = str(PurePosixPath(file.name).parent)
        if folder not in files.folders or _goes_elsewhere(file, command):
            continue
        here = {PurePosixPath(each.name).name for each in files.files} | {
            PurePosixPath(each).name for each in files.folders if str(PurePosixPath(each).parent) == folder
        }
        made = _written(file)
        named = [(name, at) for name, at in _named(command) if file.text.count(name) == 1 and name not in made]
        beside = [name for name, _ in named if name in here]
        for name, at in named:
            meant = [each for each in here if name.endswith(".py") and is_slip(name, each)]
            if PurePosixPath(name).parts[0] not in here and (beside or meant):
                other = f", and {beside[0]}, which the command names too, is" if beside else ""
                message = f"{name} isn't in this folder{other}.{nearest(name, here)}"
                yield Hit(file.name, at, message, "Correct the name, or put the file there.")


@rule(
    "launcher.module-name", severity="error", raised_by="python",
    evidence="Python 3.11 runpy, torchrun 2.13, run",
)  # fmt: skip
def module_name(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """-m with a file instead of a module: Python finds no module of that name."""
    for file, command in files.launches():
        if not command.module or command.script is None or not is_told(command.script.text):
            continue
        name = command.script.text
        if name.endswith(".py") or "/" in name:
            module = name.removeprefix("./").removesuffix(".py").replace("/", ".")
            message = f"-m takes a module, and {name} is a file: ModuleNotFoundError on each rank."
            yield Hit(file.name, command.script.at, message, f"Write -m {module}, or the file without -m.")


_WRITES = re.compile(r"(?:>>?[ \t]*|\btee[ \t]+(?:-a[ \t]+)?)[\"']?(?:\$\{?(\w+)\}?|([\w./-]+))")


def _written(file: File) -> set[str]:
    """Files that the script writes, by a name or by a variable."""
    values = {each.name: each.value for each in file.assignments}
    found = (each[2] or values.get(each[1], "") for each in _WRITES.finditer(file.text))
    return {name.removeprefix("./") for name in found}


def _goes_elsewhere(file: File, command: CommandLine) -> bool:
    """Whether the command may run in another folder than the script's own."""
    moves = any(each.words[0].text in _MOVES for each in file.value.commands)
    options = [launcher.options for launcher in command.launchers]
    return moves or file.value.directive(*_MOVED) is not None or any(each.has(*_MOVED) for each in options)


def _named(command: CommandLine) -> Iterator[tuple[str, Position]]:
    """Files that a command reads, by relative names that are told."""
    if command.script is not None and not command.module and command.script.text.endswith(".py"):
        yield from _relative(command.script.text, command.script.at)
    for options in (*(launcher.options for launcher in command.launchers), command.arguments):
        yield from _read(options)


def _read(options: Arguments) -> Iterator[tuple[str, Position]]:
    for flag in options.flags:
        if flag.name in _READ and len(flag.values) == 1:
            hosts = flag.name in ("--hostfile", "-H")
            if hosts or flag.values[0].endswith(_SUFFIXES):
                yield from _relative(flag.values[0], flag.at)


def _relative(text: str, at: Position) -> Iterator[tuple[str, Position]]:
    name = text.removeprefix("./")
    if is_told(name) and name and not name.startswith(("/", "~", "..", "-")):
        yield name, at
