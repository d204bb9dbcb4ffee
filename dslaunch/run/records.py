"""What each rank left in the run folder: RUN/ranks/RANK.pid, RANK.step, RANK.phase, RANK.exit and RANK.stacks.

rank.sh writes `pid` (its program's process and host, as JSON) and `exit` (`running`, then the exit status);
dslaunch.progress, in the program, writes `step` (the last completed step), `phase` (what it is about
to do) and `stacks` (at SIGUSR1).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.run.processes import Process

_TERMINATED = 143


@dataclass(frozen=True)
class RankRecord:
    """One rank, as its records tell. Times are Unix times, in seconds."""

    rank: int
    host: str
    """Empty where it recorded none."""
    process: Process | None
    """On that host; a container may count its processes anew."""
    status: int | None
    """Exit status; 128 + N: signal N ended it; None: it runs, or was killed with its shell."""
    changed_ns: int
    """When the record of its status changed, nanoseconds since 1970."""
    step: int | None = None
    """The last step that it completed; None before the first, or where the program tells none."""
    stepped_at: float | None = None
    steps_per_s: float | None = None
    """Mean over this attempt; None before its second step."""
    phase: str = ""
    """What it was about to do, such as `saving step 20`; empty where the program tells none."""


def read_ranks(folder: Path) -> list[RankRecord]:
    """The ranks that recorded something, by rank.

    Args:
        folder: of the records, RUN/ranks.
    """
    found = []
    for path in sorted(folder.glob("[0-9]*.exit"), key=lambda path: int(path.stem)):
        with contextlib.suppress(FileNotFoundError):  # a new attempt puts the records aside meanwhile
            found.append(_rank(path))
    return found


def first_failed(records: Sequence[RankRecord]) -> list[RankRecord]:
    """The ranks that failed, the first to fail first.

    A launcher ends the others with SIGTERM once one has failed: what they exit with is no cause, and comes last.
    """
    failed = [each for each in records if each.status]
    return sorted(failed, key=lambda each: (each.status == _TERMINATED, each.changed_ns, each.rank))


def furthest(records: Sequence[RankRecord]) -> int:
    """The last step that every rank which tells completed; 0 where none does."""
    return min((each.step for each in records if each.step is not None), default=0)


def _rank(path: Path) -> RankRecord:
    host, process = "", None
    with contextlib.suppress(ValueError):
        said = json.loads(_text(path.with_suffix(".pid")) or "{}")
        host = str(said.pop("host", ""))
        process = Process(**said) if said else None
    status = _text(path)
    return RankRecord(
        int(path.stem),
        host,
        process,
        int(status) if status.isdigit() else None,
        path.stat().st_mtime_ns,
        *_progress(path.with_suffix(".step")),
        _text(path.with_suffix(".phase")).rstrip("\0"),
    )


def _progress(path: Path) -> tuple[int | None, float | None, float | None]:
    """Step, its time, and steps a second; the file holds `STEP`, or `STEP FIRST_STEP ITS_TIME`."""
    words = _text(path).split()
    if not words or not words[0].isdigit():
        return None, None, None
    step, at = int(words[0]), path.stat().st_mtime
    if len(words) < 3 or step <= int(words[1]) or at <= float(words[2]):
        return step, at, None
    return step, at, (step - int(words[1])) / (at - float(words[2]))


def _text(path: Path) -> str:
    """Stripped; empty where the file is not there (yet)."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
