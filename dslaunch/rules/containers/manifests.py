"""What the containers of Kubernetes manifests run, read as scripts are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from dslaunch.files import script
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word, is_told
from dslaunch.files.heredoc import Written
from dslaunch.files.manifest import Container, Workload, workloads
from dslaunch.files.position import START, Path, Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.files.shell import Assignment
from dslaunch.rules.shell.heredocs import Inner

_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_COMMAND_OPTION = re.compile(r"-\w*c")
_BLOCK = re.compile(r"""(?:-\s+)*(?:(?:"[^"]*"|'[^']*'|[^\s:]+):\s+)?[|>]""")
_SET_BY_OPERATOR = ("PET_MASTER_ADDR", "PET_NODE_RANK")
"""What a PyTorchJob's pods have: where their launchers meet, and who is who."""


def of_containers(files: FileSet) -> Iterator[tuple[Workload, Container, Inner]]:
    """The command of each container of each manifest."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            for pods in workload.kinds:
                for container in pods.containers:
                    if inner := _read(file, workload, container):
                        yield workload, container, inner


def containers_of(workload: Workload) -> Iterator[Container]:
    """Those that run side by side, of all its pods."""
    return (container for pods in workload.kinds for container in pods.containers)


def shell_text(container: Container) -> tuple[Path, str] | None:
    """The script of `sh -c SCRIPT`, with its place; None where the container runs a program itself."""
    words = container.words
    if len(words) < 3 or not _SHELL.fullmatch(words[0][1]):
        return None
    at = next((index for index, (_, word) in enumerate(words) if _COMMAND_OPTION.fullmatch(word)), 0)
    return words[at + 1] if 0 < at < len(words) - 1 else None


@lru_cache(maxsize=256)
def _parsed(text: str) -> ShellScript:
    """The script, read once for all rules and file sets."""
    return script.parse(text)


def _read(file: File, workload: Workload, container: Container) -> Inner | None:
    names = _SET_BY_OPERATOR if workload.kind == "PyTorchJob" else ()
    own = tuple(Assignment(name, "", START, False) for name in names)
    if found := shell_text(container):
        written = written_block(file, *found)
        value = _parsed(written.text)
    elif container.words:
        written = Written(file.text, True, file.text, START, ())
        words = tuple(Word(text, file.at(*path), is_told(text)) for path, text in container.words)
        value = ShellScript((), (), (Command(words, words[0].at, (), None, False),), {})
    else:
        return None
    commands = tuple(replace(each, environment=(*each.environment, *own)) for each in value.commands)
    assigned = tuple(_assigned(file, container))
    value = replace(value, commands=commands, assignments=(*assigned, *value.assignments))
    inner = File(file.name, "shell", written.text, value, problems=value.problems, inside=True)
    return Inner(inner, written, file)


def _assigned(file: File, container: Container) -> Iterator[Assignment]:
    """Its variables, as `env` gives them."""
    for path, each in container.environment:
        name, value = each.get("name"), each.get("value")
        if isinstance(name, str) and isinstance(value, str):
            yield Assignment(name, value, file.at(*path), "$(" not in value)


def written_block(file: File, path: Path, text: str) -> Written:
    """A block of text behind as many line feeds as stand above it, with where each of its lines stands."""
    lines, at = file.text.split("\n"), file.at(*path)
    block = _BLOCK.match(lines[at.line - 1], at.column - 1) is not None
    first = at.line + 1 if block else at.line
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip()) if block and first <= len(lines) else at.column
    above = "\n" * (first - 1)
    source, moves, size = file.places, [], len(above)
    for number, line in enumerate(text.split("\n"), first):
        if number <= len(lines):
            moves.append((size, min(source.offset(Position(number, 1)) + indent, len(file.text))))
        size += len(line) + 1
    rest = "\n" * (len(lines) - first - text.count("\n"))  # as many lines as the manifest has
    return Written(above + text + rest, True, file.text, Position(first, 1), tuple(moves))
