"""The run folder: a name of its own, files written whole, and the proof that reviewed files are unchanged."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.files.rendered import left_out

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "dslaunch.manifest/1"


def run_names(name: str, now: datetime | None = None) -> itertools.chain[str]:
    """NAME-YYYYMMDD-HHMMSS in UTC, then the same with -2, -3 and so on."""
    stamp = f"{name}-{now or datetime.now(UTC):%Y%m%d-%H%M%S}"
    return itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(2)))


def planned(root: Path, name: str, now: datetime | None = None) -> Path:
    """The folder that `create` would make now. Nothing is made."""
    return next(path for each in run_names(name, now) if not (path := root.absolute() / each).exists())


def create(root: Path, name: str, now: datetime | None = None) -> Path:
    """Make the folder of a new run, with logs/ in it; of two callers at once each gets its own.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        for each in run_names(name, now):
            folder = root.absolute() / each
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            (folder / "logs").mkdir()
            return folder
    except OSError as error:
        raise _not_made(root, error) from error
    raise AssertionError("the names do not end")


def create_at(folder: Path) -> Path:
    """Make the folder of a run whose name a sweep has chosen, with logs/ in it.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise _not_made(folder.parent, error) from error
    return folder


def _not_made(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.root: no run folder can be made in {root.absolute()}: {error.strerror}. "
        "Name a folder that you may write to, such as run.root=$HOME/runs"
    )


def write_file(path: Path, text: str) -> None:
    """Write a file whole: a reader sees the old text or the new one. Shell scripts become executable."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    mode = 0o777 if path.suffix == ".sh" else 0o666
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}. Free the disk or choose another folder"
        ) from error


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name: text) into `folder`."""
    for name, text in files.items():
        write_file(folder / name, text)


def verify(folder: Path) -> dict[str, str]:
    """The texts of a rendered folder, manifest.json among them, once each is proved to be as rendered.

    Raises:
        ConfigError: no manifest, or a file that is missing from it or from the folder, or differs from its hash.
    """
    manifest = _read(folder, MANIFEST)
    files = {MANIFEST: manifest}
    hashes = _manifest_hashes(folder, manifest)
    if missing := left_out(hashes, (path.name for path in folder.iterdir())):
        raise ConfigError(
            f"{folder / MANIFEST}: does not name {missing[0]}, so that file was not reviewed with the others. "
            "Render again"
        )
    for name, expected in hashes.items():
        files[name] = _read(folder, name)
        found = hashlib.sha256(files[name].encode()).hexdigest()
        if found != expected:
            raise ConfigError(
                f"{folder / name}: changed since it was rendered: its sha256 is {found[:12]}..., in the manifest "
                f"{expected[:12]}... Render again, or put the change into the recipe, an override, or a template "
                "of your site folder, so that it is planned and checked like the rest"
            )
    return files


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{folder / name}: not UTF-8, so not as rendered. Render again") from error
    except OSError as error:
        raise ConfigError(
            f"{folder / name}: {error.strerror}. A folder to launch holds all that `render -o DIR` wrote: "
            "render again, or name that folder"
        ) from error


def _manifest_hashes(folder: Path, text: str) -> dict[str, str]:
    where = folder / MANIFEST
    try:
        manifest = json.loads(text)
        schema, hashes = manifest["schema"], manifest["files"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: not a manifest of dslaunch. Render again") from error
    if schema != MANIFEST_SCHEMA:
        raise ConfigError(f"{where}: schema is {schema!r}, read is {MANIFEST_SCHEMA}. Render again")
    if not isinstance(hashes, dict):
        raise ConfigError(f"{where}: files is {hashes!r}, where hashes by name belong. Render again")
    for name, digest in hashes.items():
        if not isinstance(digest, str):
            raise ConfigError(f"{where}: files.{name} is {digest!r}, where a sha256 belongs. Render again")
        if Path(name).name != name:
            raise ConfigError(f"{where}: names {name!r}, which is no plain file name. Render again")
    return hashes
