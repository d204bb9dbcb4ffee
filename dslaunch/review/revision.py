"""What a git revision held: folders of it, put into a folder for a moment."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from dslaunch.errors import ConfigError

SITE_FOLDERS = ("conf", "recipes", "templates", "dslaunch.yaml", "efficiency.yaml")
_LIMIT_S = 60.0


@contextmanager
def checked_out(revision: str, folder: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """A copy of `folder` as it was at `revision`, in a temporary folder; nothing of the checkout is touched.

    Args:
        folder: in a git checkout; it may be gone by now.
        names: what of the folder is wanted; empty: all of it.

    Raises:
        ConfigError: no git, no checkout, no such revision, or nothing there at that revision.
    """
    place = _existing(folder)
    top = Path(_git(place, "rev-parse", "--show-toplevel").decode().strip())
    inside = Path(os.path.relpath(folder.resolve(), top.resolve()))
    sha = commit_of(revision, folder)
    listed = _git(top, "ls-tree", "--name-only", "-z", sha, f"{inside}/" if str(inside) != "." else "./")
    there = {Path(os.fsdecode(name)).name for name in listed.split(b"\0") if name}
    wanted = sorted(there & set(names)) if names else sorted(there)
    if not wanted:
        what = " or ".join(names) if names else "files"
        raise ConfigError(
            f"the revision holds no {what} in {inside}. Name a folder that it has (`git ls-tree {revision}`); "
            "--config-dir SITE names a site's."
        )
    archive = _git(top, "archive", "--format=tar", sha, "--", *(str(inside / name) for name in wanted))
    with TemporaryDirectory(prefix="dslaunch-") as temporary:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(temporary, filter="data")
        yield Path(temporary) / inside


def commit_of(revision: str, folder: Path) -> str:
    """The full id of a commit of the checkout that `folder` is in; raises ConfigError where there is none."""
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return _git(_existing(folder), *words).decode().strip()


def changed_since(revision: str, folder: Path) -> list[PurePosixPath]:
    """The files inside `folder` that are not as they were at `revision`: changed, new, not committed, or gone."""
    sha = commit_of(revision, folder)
    tracked = _git(folder, "diff", "--name-only", "--no-renames", "--relative", "-z", sha, "--", ".")
    new = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    return [PurePosixPath(os.fsdecode(name)) for name in (tracked + new).split(b"\0") if name]


def _existing(folder: Path) -> Path:
    """The nearest folder that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _git(place: Path, *words: str) -> bytes:
    command = ["git", "-C", str(place), *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git does not run here: {error}. Install git, or name folders.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "no such revision"
        raise ConfigError(
            f"`{' '.join(command)}` fails: {said}. Give git:REV or git:REV:FOLDER with a revision of this "
            "checkout (`git log`); a shallow clone needs `git fetch --unshallow`."
        )
    return done.stdout
