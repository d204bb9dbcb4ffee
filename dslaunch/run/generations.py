"""Generations: the plans that an elastic run went through, each whole, in RUN/generations/N.

The first is the launch's; a run that was never planned anew has no such folder. The files of the newest stand in
the run folder too, which is where everybody reads them. `complete` makes a crash good that came between.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from dslaunch.run.folder import MANIFEST, verify, write_file, write_files

FOLDER = "generations"


def generation_of(run_dir: Path) -> int:
    """The number of the newest generation, counted from 1."""
    return max((int(path.name) for path in (run_dir / FOLDER).glob("[0-9]*")), default=1)


def first_files(run_dir: Path) -> dict[str, str]:
    """The files of the launch, proved unchanged by their hashes; raises ConfigError like `verify`."""
    first = run_dir / FOLDER / "1"
    return verify(first if first.is_dir() else run_dir)


def begin_generation(run_dir: Path, files: Mapping[str, str]) -> int:
    """Put `files` in the place of those of the run folder, which are kept; returns the new generation's number.

    Raises:
        ConfigError: a file cannot be written, or one of the run folder has changed since it was rendered.
    """
    before = verify(run_dir)
    if not (run_dir / FOLDER).is_dir():
        _keep(run_dir, 1, before)
    number = generation_of(run_dir) + 1
    _keep(run_dir, number, files)
    _place(run_dir, files, stale=set(before) - set(files))
    return number


def complete(run_dir: Path) -> None:
    """Finish putting the newest generation's files into the run folder, where a crash came between."""
    newest = run_dir / FOLDER / str(generation_of(run_dir))
    if not newest.is_dir() or _manifest(newest) == _manifest(run_dir):
        return
    files = verify(newest)
    earlier = run_dir / FOLDER / str(int(newest.name) - 1)
    _place(run_dir, files, stale=set(verify(earlier)) - set(files))


def _keep(run_dir: Path, number: int, files: Mapping[str, str]) -> None:
    """Write a generation's folder whole, or not at all."""
    unfinished = run_dir / FOLDER / f".{number}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_files(unfinished, files)
    unfinished.rename(run_dir / FOLDER / str(number))


def _place(run_dir: Path, files: Mapping[str, str], stale: set[str]) -> None:
    """The manifest comes last: it says that the others are there."""
    write_files(run_dir, {name: text for name, text in files.items() if name != MANIFEST})
    for name in stale:
        (run_dir / name).unlink(missing_ok=True)
    write_file(run_dir / MANIFEST, files[MANIFEST])


def _manifest(folder: Path) -> bytes:
    path = folder / MANIFEST
    return path.read_bytes() if path.is_file() else b""
