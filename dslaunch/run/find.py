"""Which run is meant: a name under run.root, a folder, or nothing for the newest."""

from __future__ import annotations

from pathlib import Path

from dslaunch.errors import ConfigError, nearest

STATE = "state.json"


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
    names = [path.parent.name for path in root.glob(f"*/{STATE}")]
    raise ConfigError(
        f"{word}: no run: neither that folder nor {root / word} holds a {STATE}.{nearest(word, names)} "
        "`dslaunch runs` lists them; another place is named by run.root=DIR."
    )


def _newest(root: Path) -> Path:
    """Files are rendered once a run, so their age tells the order of the launches."""
    folders = [path.parent for path in root.glob(f"*/{STATE}")]
    if not folders:
        raise ConfigError(f"{root}: no run. Name a run's folder, or where runs are: run.root=DIR.")
    return max(folders, key=_launched).absolute()


def _launched(folder: Path) -> tuple[int, str]:
    manifest = folder / "manifest.json"
    return (manifest.stat().st_mtime_ns if manifest.exists() else 0), folder.name
