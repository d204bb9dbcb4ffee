"""Which run is meant: a name under run.root, a folder, or nothing for the newest."""

from __future__ import annotations

import shlex
from pathlib import Path

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.run.sweeps import SWEEP
from dslaunch.schema.launch import Run

STATE = "state.json"
_MOST_NAMES = 5
"""The newest of the names that begin as the word does."""
_KEEPS_PLAN = (
    " A run keeps the plan that it was launched with. For another one launch anew; checkpoint.load=FOLDER starts "
    "from a checkpoint of this one."
)


def run_and_root(verb: str, words: tuple[str, ...]) -> tuple[str, Path]:
    """The word that names a run or a sweep, empty where there is none, and run.root."""
    roots = [word.removeprefix("run.root=") for word in words if word.startswith("run.root=")]
    runs = [word for word in words if not word.startswith("run.root=")]
    if len(runs) > 1 or len(roots) > 1:
        changed = any("=" in word for word in runs)
        raise ConfigError(
            f"{verb} takes one run, and run.root=DIR; found {listed(words)}.{_KEEPS_PLAN if changed else ''}"
        )
    return (runs[0] if runs else ""), Path(roots[0] if roots else Run().root)


def find_run(word: str, root: Path) -> Path:
    """The run's folder, absolute.

    Args:
        word: a run's name, or a path to its folder; empty: the run that was launched last.
        root: run.root.

    Raises:
        ConfigError: there is no such run.
    """
    if not word:
        return _newest(root)
    for folder in (Path(word).expanduser(), root / word):
        if (folder / STATE).is_file():
            return folder.absolute()
    names = sorted(path.parent.name for kind in (STATE, SWEEP) for path in root.glob(f"*/{kind}"))
    begin = [name for name in names if name.startswith(f"{word}-")][-_MOST_NAMES:]
    meant = f" Runs that begin so: {listed(begin)}." if begin else nearest(word, names)
    raise ConfigError(
        f"{word}: no run: neither that folder nor {root / word} holds a {STATE}.{meant} "
        "`dslaunch runs` lists them; another place is named by run.root=DIR."
    )


def word_for(folder: Path) -> str:
    """What names the run or sweep in a command that is typed in this folder, as a shell word."""
    near = Path(Run().root, folder.name).absolute() == folder.absolute()
    return shlex.quote(folder.name if near else str(folder))


def _newest(root: Path) -> Path:
    """Files are rendered once a run, so their age tells the order of the launches."""
    folders = [path.parent for path in root.glob(f"*/{STATE}")]
    if not folders:
        raise ConfigError(f"{root}: no run. Name a run's folder, or where runs are: run.root=DIR.")
    return max(folders, key=_launched).absolute()


def _launched(folder: Path) -> tuple[int, str]:
    manifest = folder / "manifest.json"
    return (manifest.stat().st_mtime_ns if manifest.exists() else 0), folder.name
