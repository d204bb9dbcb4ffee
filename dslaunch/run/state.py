"""What is known of a run: state.json (the present) and events.jsonl (how it came about)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dslaunch.errors import ConfigError
from dslaunch.run.folder import write_file
from dslaunch.run.lines import row_of
from dslaunch.run.processes import Process

STATE_SCHEMA = "dslaunch.state/1"
EVENTS_SCHEMA = "dslaunch.events/1"
_APART = re.compile(rb'\n|(?=\{"schema": "dslaunch\.events/)')
"""Between two events; in the texts of an event the quotes are escaped."""
Status = Literal["prepared", "submitted", "running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class State:
    """The present of a run. Written as state.json."""

    run: str
    """Name of the run folder."""
    launcher: str
    """local | torchrun | ssh | slurm; empty where none was found."""
    status: Status
    exit_status: int | None = None
    """Of the rank that failed first, where ranks record it, else of the launcher; None until the job ended."""
    process: Process | None = None
    """The launcher's process on this host, leader of its process group."""
    slurm_job: str = ""
    """The job's id; empty for other launchers."""
    supervisor: Process | None = None
    """The dslaunch process that watches over the launcher's process, and ends it where it gets a signal itself."""
    host: str = ""
    """Name of the host of `process` and `supervisor`; process ids mean nothing elsewhere."""
    attempt: int = 1
    """Starts of the same rendered files, this one included: 2 after the first resume or restart."""
    work_dir: str = ""
    """Where the user stood at the launch: what relative paths of the plan start from."""
    continuations: tuple[str, ...] = ()
    """Jobs queued behind `slurm_job`, each of which goes on where the one before it failed."""
    schema: str = STATE_SCHEMA


def write_state(folder: Path, state: State) -> None:
    """Replace state.json."""
    write_file(folder / "state.json", json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n")


def read_state(folder: Path) -> State:
    """The state of a run.

    Raises:
        ConfigError: not a run folder, or a state of another schema.
    """
    where = folder / "state.json"
    try:
        data = json.loads(where.read_text(encoding="utf-8"))
        if data["schema"] != STATE_SCHEMA:
            raise ValueError(f"schema is {data['schema']!r}, read is {STATE_SCHEMA}")
        for name in ("process", "supervisor"):
            data[name] = Process(**data[name]) if data.get(name) else None
        data["continuations"] = tuple(data.get("continuations", ()))
        return State(**data)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: no state of a run: {error}. Name a run's folder, under run.root"
        ) from error


def update_state(folder: Path, **changes: Any) -> None:
    """Replace the named fields of state.json."""
    write_state(folder, dataclasses.replace(read_state(folder), **changes))


def append_event(folder: Path, kind: str, **details: Any) -> None:
    """Add one line to events.jsonl, in one write, so that writers at the same time do not mix."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = {"schema": EVENTS_SCHEMA, "time": now, "kind": kind, "details": details}
    line = json.dumps(event, ensure_ascii=False) + "\n"
    descriptor = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events, oldest first; one that a crash cut off is left out, and not what follows on its line."""
    path = folder / "events.jsonl"
    parts = _APART.split(path.read_bytes()) if path.exists() else []
    return [event for event in map(row_of, parts) if event is not None]
