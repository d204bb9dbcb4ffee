"""A rendered folder: written whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.run.folder import write_file


def write_rendering(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` into `folder`, in place of an earlier rendering.

    Raises:
        ConfigError: the folder holds something that no rendering put there, or it can't be written.
    """
    stale = _earlier(folder) - set(files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_file(folder / name, text)
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"-o {folder}: {error.strerror}. Give a folder that can be written.") from error


def _earlier(folder: Path) -> set[str]:
    """Names of an earlier rendering's files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"-o {folder}: is a file. Give a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return set()
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return {name for name in manifest["files"] if "/" not in name}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"-o {folder}: holds files that dslaunch did not render. Give a new or an empty folder."
        ) from error
