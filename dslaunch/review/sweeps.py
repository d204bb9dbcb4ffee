"""A sweep's runs, as `dslaunch status SWEEP` shows them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dslaunch.run.status import read_status, status_object, step_words
from dslaunch.run.sweeps import SweepRun, read_sweep, run_folder

SCHEMA = "dslaunch.sweep-status/1"
_HEADING = ("run", "values", "state", "job", "step")


def status_of_sweep(folder: Path) -> dict[str, Any]:
    """`{"schema": "dslaunch.sweep-status/1", ...}`; raises ConfigError where sweep.json or a run can't be read."""
    runs = [{**asdict(run), "status": _status(run_folder(folder, run.number))} for run in read_sweep(folder).runs]
    return {"schema": SCHEMA, "sweep": str(folder), "runs": runs}


def sweep_rows(folder: Path) -> list[tuple[str, ...]]:
    """How each run stands, with a heading; of one that was not launched why."""
    return [_HEADING, *(_row(folder, run) for run in read_sweep(folder).runs)]


def _status(where: Path) -> dict[str, Any] | None:
    return status_object(read_status(where)) if where.is_dir() else None


def _row(folder: Path, run: SweepRun) -> tuple[str, ...]:
    where, values = run_folder(folder, run.number), " ".join(run.values)
    if run.refused:
        return (where.name, values, "refused", "", run.refused.splitlines()[0])
    if not where.is_dir():
        return (where.name, values, "not launched", "", "")
    found = read_status(where)
    return (where.name, values, found.now.standing, found.now.job, step_words(found) or found.now.why)
