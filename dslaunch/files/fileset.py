"""Texts, read into files that know each key's line and column. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as DiskPath
from types import MappingProxyType
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.files import hostfile, megatron, relaxed_json, shell
from dslaunch.files.kinds import Kind, json_kind, looks_like_json, text_kind
from dslaunch.files.position import START, Path, Position, Problem

MAX_BYTES = 10_000_000
"""The largest file that is read; a hostfile of 100,000 hosts has about 3 million."""


@dataclass(frozen=True)
class File:
    """One text, parsed as its kind."""

    name: str
    kind: Kind
    text: str
    value: Any = None
    """JSON kinds: the parsed value, or None after a syntax error. hostfile: tuple of HostLine. megatron_args:
    MegatronArgs. shell, env: tuple of Assignment. other: None."""
    positions: Mapping[Path, Position] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[Problem, ...] = ()

    def at(self, *path: str | int) -> Position:
        """Where the key at `path` stands, or the nearest one above it."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions[path] if path else START

    def get(self, *path: str) -> Any:
        """The value at `path` of a JSON document, or None where it isn't there."""
        value = self.value
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class FileSet:
    """Files that belong together: those of one run folder, or of one command line."""

    files: tuple[File, ...]

    def of(self, *kinds: Kind) -> tuple[File, ...]:
        """The files of these kinds, in order of their names."""
        return tuple(file for file in self.files if file.kind in kinds)


def read_fileset(texts: Mapping[str, str]) -> FileSet:
    """The files of `{name: text}`; a name may hold folders."""
    return FileSet(tuple(_read(name, texts[name]) for name in sorted(texts)))


def read_paths(paths: Iterable[DiskPath]) -> FileSet:
    """The files at `paths`, each named as it was given.

    Raises:
        ConfigError: a path that can't be read, is no plain file, is too large, or is not UTF-8 text.
    """
    return read_fileset({str(path): _text(path) for path in paths})


def _read(name: str, text: str) -> File:
    if looks_like_json(name, text):
        return _read_json(name, text)
    kind = text_kind(name, text)
    if kind == "hostfile":
        return File(name, kind, text, hostfile.parse(text))
    if kind == "megatron_args":
        flags = megatron.parse(text)
        return File(name, kind, text, flags, problems=flags.problems)
    if kind in ("shell", "env"):
        return File(name, kind, text, shell.assignments(text))
    return File(name, kind, text)


def _read_json(name: str, text: str) -> File:
    try:
        document = relaxed_json.parse(text)
    except relaxed_json.JsonSyntaxError as error:
        return File(name, json_kind(name, None), text, problems=(error.problem,))
    positions = MappingProxyType(document.positions)
    return File(name, json_kind(name, document.value), text, document.value, positions, document.problems)


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
        raise ConfigError(f"{path}: can't be read: {error.strerror}. Name a file that is there.") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes; no configuration is. Name another file.")
    if b"\0" in data:
        raise ConfigError(f"{path}: a binary file; a text file is needed.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is no UTF-8. Save the file as UTF-8 and check it again."
        ) from error
