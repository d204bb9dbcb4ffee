"""A sweep: runs that were planned and launched together. Its folder holds sweep.json alone; the run folders of its
runs stand beside it, named SWEEP.1, SWEEP.2 and so on, and each is a run like any other."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.run.folder import planned, write_file

SWEEP = "sweep.json"
SCHEMA = "dslaunch.sweep/1"


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    number: int
    """Its place in the table, counted from 1."""
    values: tuple[str, ...]
    """Its values of the overrides that have several, as KEY=VALUE."""
    refused: str = ""
    """Why it was not launched; empty where it was."""


@dataclass(frozen=True)
class Sweep:
    """What sweep.json holds."""

    runs: tuple[SweepRun, ...]
    schema: str = SCHEMA


def sweep_folder(root: Path, name: str, now: datetime | None = None) -> Path:
    """The folder that a sweep of plans named `name` gets under `root` now. Nothing is made."""
    return planned(root, f"{name}-sweep", now)


def run_folder(sweep: Path, number: int) -> Path:
    """The run folder of a sweep's run."""
    return sweep.with_name(f"{sweep.name}.{number}")


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Make the sweep's folder with its sweep.json; raises ConfigError where that cannot be done."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.root: {folder} cannot be made: {error.strerror}. Name a folder that you may write to, such as "
            "run.root=$HOME/runs"
        ) from error
    write_file(folder / SWEEP, json.dumps(dataclasses.asdict(sweep), indent=2, sort_keys=True) + "\n")


def find_sweep(word: str, root: Path) -> Path | None:
    """The folder of the sweep that `word` names: a path, or a name under `root`; None where it names none."""
    folders = (Path(word).expanduser(), root / word) if word else ()
    return next((folder.absolute() for folder in folders if (folder / SWEEP).is_file()), None)


def read_sweep(folder: Path) -> Sweep:
    """Raises ConfigError where sweep.json cannot be read."""
    where = folder / SWEEP
    try:
        data = json.loads(where.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema is {data['schema']!r}, read is {SCHEMA}")
        runs = (
            SweepRun(each["number"], tuple(each["values"]), each.get("refused", "")) for each in data["runs"]
        )
        return Sweep(tuple(runs))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: no sweep: {error}. `dslaunch runs` lists the runs") from error


def launched(folder: Path) -> list[tuple[SweepRun, Path]]:
    """The runs of a sweep that have a run folder, in their order."""
    found = [(run, run_folder(folder, run.number)) for run in read_sweep(folder).runs if not run.refused]
    return [(run, path) for run, path in found if (path / "state.json").is_file()]
