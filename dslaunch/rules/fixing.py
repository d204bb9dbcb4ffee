"""What `check --fix` changes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from dslaunch.errors import ConfigError, listed
from dslaunch.rules.checking import Job, sorted_hits
from dslaunch.rules.edits import applied, diff
from dslaunch.rules.registry import NO_EDITS, Edit, Edits

_ANY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def edits_of(job: Job) -> Edits:
    """What --fix would change; nothing in a rendered folder, which is mended in its recipe."""
    if job.whole_folder:
        return NO_EDITS
    return {(rule.id, hit.where): hit.edit for rule, hit in sorted_hits(job) if hit.edit is not None}


def mended_texts(job: Job, standing: Collection[tuple[str, str]]) -> tuple[dict[str, str], str]:
    """The texts of the files that change, by name, and their unified diff.

    Args:
        standing: (rule, where) of the findings that are not waived.

    Raises:
        ConfigError: a rendered folder, whose files belong to their manifest.
    """
    if job.whole_folder:
        raise ConfigError(
            "--fix: a rendered folder is mended in its recipe, by an override or by a template; then render again."
        )
    edits: dict[str, list[Edit]] = {}
    for rule, hit in sorted_hits(job):
        if hit.edit is not None and (rule.id, hit.where) in standing:
            edits.setdefault(hit.name, []).append(hit.edit)
    before = {file.name: file.text for file in job.files.files}
    after = {name: applied(before[name], found) for name, found in edits.items()}
    return after, diff(before, after)


def write_texts(texts: Mapping[str, str]) -> None:
    """Each file anew with its permissions, owner and links; none of them where one can't be written.

    Raises:
        ConfigError: a file that is read-only, or a folder that takes no file.
    """
    places = {name: Path(name).resolve() for name in texts}
    for name, path in places.items():
        if not path.stat().st_mode & _ANY_WRITES or not os.access(path, os.W_OK):
            raise ConfigError(
                f"--fix {name}: the file is read-only, and nothing was written. Make it writable."
            )
    staged: dict[str, str] = {}
    written: list[str] = []
    at = ""
    try:
        for at, text in texts.items():
            staged[at] = _staged(places[at], text)
        for at in texts:
            _put(staged[at], places[at])
            written.append(at)
    except OSError as error:
        said = f"{listed(written)} had been written" if written else "nothing was written"
        raise ConfigError(
            f"--fix {at}: {error.strerror}; {said}. Make the file and its folder writable."
        ) from error
    finally:
        for temporary in staged.values():
            Path(temporary).unlink(missing_ok=True)


def _staged(path: Path, text: str) -> str:
    """A temporary file beside `path` that holds the text, with its permissions."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o7777)
    except OSError:
        Path(temporary).unlink()
        raise
    return temporary


def _put(temporary: str, path: Path) -> None:
    """The temporary file in the place of `path`: by a rename, or by its content where others hold the file."""
    old, new = path.stat(), Path(temporary).stat()
    if old.st_nlink == 1 and (old.st_uid, old.st_gid) == (new.st_uid, new.st_gid):
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:  # mounted by itself, as in a container
                raise
    shutil.copyfile(temporary, path)
