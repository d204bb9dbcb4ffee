"""What `check --fix` changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.rules.checking import Job, sorted_hits
from dslaunch.rules.edits import applied, diff
from dslaunch.rules.registry import NO_EDITS, Edit, Edits


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
    """Each file anew with its permissions, or not at all; raises ConfigError where one can't be written."""
    for name, text in texts.items():
        path = Path(name).resolve()
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with open(handle, "w", encoding="utf-8", newline="") as stream:
                stream.write(text)
            os.chmod(temporary, path.stat().st_mode & 0o7777)
            os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(f"--fix {name}: {error.strerror}. Make the file writable.") from error
