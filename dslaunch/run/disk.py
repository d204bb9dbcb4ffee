"""Full disks: an attempt that ended at one is told so, though nobody could write it down."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from dslaunch.run.causes import Evidence

RESERVE = ".reserve"
_RESERVED = 1 << 18
"""Bytes: the records of an attempt's end take a tenth."""
_TRIED = ".dslaunch-room"
_LEAST = 1 << 16
"""Bytes for which there is room on a disk that is not full."""


def reserve(run_dir: Path) -> None:
    """Hold room on the disk of the run folder, which `give_back` hands to the last records of the attempt."""
    with contextlib.suppress(OSError):
        descriptor = os.open(run_dir / RESERVE, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVED)
        finally:
            os.close(descriptor)


def give_back(run_dir: Path) -> None:
    """End what `reserve` began."""
    (run_dir / RESERVE).unlink(missing_ok=True)


def full_disks(folders: Sequence[Path]) -> tuple[Evidence, ...]:
    """What this host's file systems say where they take nothing more in a folder; of one that is there."""
    said = [(folder, _refusal(folder)) for folder in folders if folder.is_dir()]
    return tuple(Evidence("this host", f"{folder}: {why}") for folder, why in said if why)


def _refusal(folder: Path) -> str:
    """Why nothing can be written there for want of room; a quota is not seen but by trying."""
    place = folder / _TRIED
    try:
        place.write_bytes(bytes(_LEAST))
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # some file systems tell only then
        finally:
            os.close(descriptor)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
    return ""
