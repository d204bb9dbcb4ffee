"""Texts, read into files that know each key's line and column. Nothing is judged here."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as DiskPath
from types import MappingProxyType
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.files import (
    checkpoint,
    envfile,
    hostfile,
    megatron,
    megatron_folder,
    python,
    relaxed_json,
    script,
    shell,
    submitting,
    yaml_text,
)
from dslaunch.files.commands import CommandLine
from dslaunch.files.flags import Arguments
from dslaunch.files.kinds import (
    Kind,
    are_records,
    is_template,
    is_unnamed_yaml,
    json_kind,
    looks_like_json,
    looks_like_yaml,
    meant_json,
    meant_yaml,
    text_kind,
    yaml_kind,
)
from dslaunch.files.position import START, Lines, Path, Position, Problem, lines_of
from dslaunch.files.python import PythonScript
from dslaunch.files.relaxed_json import Document
from dslaunch.files.script import ShellScript
from dslaunch.files.shell import Assignment

MAX_BYTES = 10_000_000
"""The largest file that is read; a hostfile of 100,000 hosts has about 3 million."""
MAX_FILES = 500
_MAX_CODE = 1_000_000
"""Characters of anything but JSON and hostfiles; the longest launch script seen has 60,000."""


@dataclass(frozen=True)
class File:
    """One text, parsed as its kind."""

    name: str
    kind: Kind
    text: str
    value: Any = None
    """JSON and YAML kinds: the parsed value, or None after a syntax error. hostfile: tuple of HostLine.
    megatron_args: Arguments. shell: ShellScript. env: tuple of Assignment. deepspeed_env: tuple of EnvLine.
    python: PythonScript. checkpoint: Checkpoint. megatron_checkpoint:
    MegatronCheckpoint. other: None."""
    positions: Mapping[Path, Position] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[Problem, ...] = ()
    inside: bool = False
    """A document within a script: `text` is the whole script."""

    def at(self, *path: str | int) -> Position:
        """Where the key at `path` stands, or the nearest one above it."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, START)

    def holds(self, pattern: str | re.Pattern[str]) -> bool:
        """Whether a pattern stands in the text; rules ask it for each command, and it is searched once."""
        if pattern not in self._held:
            self._held[pattern] = re.search(pattern, self.text) is not None
        return self._held[pattern]

    @cached_property
    def lines(self) -> list[str]:
        """The text's lines, without their ends."""
        return lines_of(self.text)

    @cached_property
    def places(self) -> Lines:
        """Offsets of the text as positions, and back."""
        return Lines(self.text)

    @cached_property
    def _held(self) -> dict[str | re.Pattern[str], bool]:
        return {}

    def get(self, *path: str) -> Any:
        """The value at `path` of a JSON or YAML document, or None where it isn't there."""
        value = self.value
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """Each NAME=value in a script or an environment file."""
        if self.kind == "shell":
            return tuple(self.value.assignments) if self.value else ()
        if self.kind == "deepspeed_env":
            return tuple(Assignment(line.name, line.value, line.at, True) for line in self.value if line.name)
        return tuple(self.value) if self.kind == "env" else ()


@dataclass(frozen=True)
class FileSet:
    """Files that belong together: those of one run folder, or of one command line."""

    files: tuple[File, ...]
    folders: frozenset[str] = frozenset()
    """Folders that were read as a whole, and those in them."""

    def of(self, *kinds: Kind) -> tuple[File, ...]:
        """The files of these kinds, in order of their names."""
        # Every rule asks for its kind, mostly in vain.
        return tuple(file for file in self.files if file.kind in kinds) if self._kinds.intersection(kinds) else ()

    @cached_property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset(file.kind for file in self.files)

    def scripts(self) -> Iterator[tuple[File, ShellScript]]:
        """The shell scripts that could be read."""
        return ((file, file.value) for file in self.of("shell") if file.value is not None)

    def pythons(self) -> Iterator[tuple[File, PythonScript]]:
        """The Python files that could be read."""
        return ((file, file.value) for file in self.of("python") if not file.problems)

    def launches(self) -> Iterator[tuple[File, CommandLine]]:
        """The commands in scripts that start programs on ranks."""
        return ((file, launch) for file, shell_script in self.scripts() for launch in shell_script.launches)

    def megatron(self) -> Iterator[tuple[File, Arguments]]:
        """Megatron's arguments: in files of their own, and in commands that start a script of Megatron's."""
        for file in self.of("megatron_args"):
            yield file, file.value
        for file, launch in self.launches():
            if megatron.is_megatron(launch):
                yield file, megatron.arguments_of(launch)


def read_fileset(texts: Mapping[str, str]) -> FileSet:
    """The files of `{name: text}`; a name may hold folders."""
    return _submitted(FileSet(tuple(_read(name, texts[name]) for name in sorted(texts))))


def _submitted(files: FileSet) -> FileSet:
    """The files, of which a script is read with the options that another script submits it with."""
    if not any("sbatch " in file.text for file in files.of("shell")):
        return files
    scripts = {file.name: own for file, own in files.scripts() if not file.problems}
    found = submitting.overridden(scripts, {file.name: file.text for file in files.files})
    changed = (replace(file, value=found[file.name]) if file.name in found else file for file in files.files)
    return FileSet(tuple(changed), files.folders)


def read_paths(paths: Iterable[DiskPath]) -> FileSet:
    """The files at `paths`, each named as it was given.

    Raises:
        ConfigError: a path that can't be read, is no plain file, is too large, or is not UTF-8 text.
    """
    return read_fileset({str(path): _text(path) for path in paths})


def read_folder(folder: DiskPath) -> FileSet:
    """The files in a folder, which may hold what nobody meant to be checked: that is said, and no error.

    Of a folder of checkpoints only the names of what was saved are read, and the model's configuration.

    Raises:
        ConfigError: more files than any project's folder of configurations has, or a folder that can't be read.
    """
    try:
        if found := checkpoint.find(folder):
            return _saved(folder, *found)
        if saved := megatron_folder.find(folder):
            name, text, value = saved
            return FileSet((File(name, "megatron_checkpoint", text, value),))
        inside = sorted(folder.iterdir())
        paths = [path for path in inside if not path.is_dir()]
    except OSError as error:
        raise _unreadable(folder, error, "a folder") from error
    if len(paths) > MAX_FILES:
        raise ConfigError(f"{folder}: {len(paths):,} files; at most {MAX_FILES} are read. Name those to check.")
    folders = frozenset(str(path) for path in (folder, *inside) if path not in paths)
    return _submitted(FileSet(tuple(_read_or_say(path) for path in paths), folders))


def is_rendered(path: DiskPath) -> bool:
    """Whether it is a folder with a plan; raises ConfigError where it may not be looked into."""
    try:
        return (path / "plan.json").is_file()
    except OSError as error:
        raise _unreadable(path, error, "a file") from error


def _saved(folder: DiskPath, name: str, text: str, value: checkpoint.Checkpoint) -> FileSet:
    """A checkpoint, and the config.json that Hugging Face's Trainer saves beside it."""
    saved = File(name, "checkpoint", text, value)
    model = folder / "config.json"
    return FileSet((_read_or_say(model), saved) if model.is_file() else (saved,))


def _read_or_say(path: DiskPath) -> File:
    try:
        text = _text(path)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ").rstrip(".")
        return File(str(path), "other", "", problems=(Problem("file.unread", reason, START),))
    return _read(str(path), text)


def joined(filesets: Iterable[FileSet]) -> FileSet:
    """All files, in order of their names, each once."""
    every = list(filesets)
    by_name = {file.name: file for fileset in every for file in fileset.files}
    folders = frozenset[str]().union(*(fileset.folders for fileset in every))
    return _submitted(FileSet(tuple(by_name[name] for name in sorted(by_name)), folders))


def _read(name: str, text: str) -> File:
    if looks_like_json(name, text):
        return _read_tree(name, text, relaxed_json.parse, json_kind)
    if looks_like_yaml(name):
        return _too_long(name, text) or _read_tree(name, text, yaml_text.parse, yaml_kind)
    if is_template(name, text):
        message = "a template: the text that is made of it can be checked"
        return File(name, "other", text, problems=(Problem("file.unread", message, START),))
    kind = text_kind(name, text)
    if kind == "hostfile":
        return File(name, kind, text, hostfile.parse(text))
    if file := _too_long(name, text):
        return file
    if kind == "other" and is_unnamed_yaml(name, text):
        tree = _read_tree(name, text, yaml_text.parse, yaml_kind)
        return tree if isinstance(tree.value, dict) else File(name, kind, text)
    if kind in _READERS:
        return File(name, kind, text, _READERS[kind](text))
    if kind in _PROBLEM_READERS:
        value = _PROBLEM_READERS[kind](text)
        return File(name, kind, text, value, problems=value.problems)
    return File(name, kind, text)


_READERS: dict[Kind, Callable[[str], Any]] = {
    "env": shell.assignments,
    "deepspeed_env": envfile.parse,
}
_PROBLEM_READERS: dict[Kind, Callable[[str], Any]] = {
    "megatron_args": megatron.parse,
    "shell": script.parse,
    "python": python.parse,
}
"""Their values carry the problems of the text."""


def _too_long(name: str, text: str) -> File | None:
    """The file unread, where no script or configuration of this kind has that many characters."""
    if len(text) <= _MAX_CODE:
        return None
    message = f"{len(text):,} characters, and a file of this kind is read up to {_MAX_CODE:,}"
    return File(name, "other", text, problems=(Problem("file.unread", message, START),))


def _read_tree(
    name: str, text: str, parse: Callable[[str], Document], kind: Callable[[str, Any], Kind]
) -> File:
    try:
        document = parse(text)
    except (relaxed_json.JsonSyntaxError, yaml_text.YamlError) as error:
        return _unparsed(name, kind(name, None), text, error.problem)
    positions = MappingProxyType(document.positions)
    return File(name, kind(name, document.value), text, document.value, positions, document.problems)


def _unparsed(name: str, kind: Kind, text: str, problem: Problem) -> File:
    """A text that can't be read, or is too large, is wrong only where it is meant to be a configuration."""
    meant = kind not in ("json", "yaml") or (kind == "yaml" and meant_yaml(text))
    other = kind == "json" and (are_records(text) or not meant_json(text))
    unread = kind == "yaml" or problem.rule == "file.unread" or other
    rule = "file.syntax" if meant else "file.unread" if unread else problem.rule
    return File(name, kind, text, problems=(replace(problem, rule=rule),))


def _unreadable(path: DiskPath, error: OSError, kind: str) -> ConfigError:
    denied = isinstance(error, PermissionError)
    fix = f"Run as a user who may read it (`ls -ld {path}`)" if denied else f"Name {kind} that is there"
    return ConfigError(f"{path}: can't be read: {error.strerror}. {fix}.")


def _text(path: DiskPath) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: a folder; name the files in it that are to be checked.")
        if not path.is_file():
            path.stat()
            raise ConfigError(f"{path}: neither a file nor a folder; name a text file.")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error, "a file") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes; no configuration is. Name another file.")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}: UTF-16. Save the file as UTF-8 and check it again.")
    if b"\0" in data:
        raise ConfigError(f"{path}: a binary file; a text file is needed.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is no UTF-8. Save the file as UTF-8 and check it again."
        ) from error
