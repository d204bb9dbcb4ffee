"""Whether the ranks' own records, which rank.sh keeps as RUN/ranks/RANK.exit, hold anything against a run.

A launcher's own exit status is not enough. DeepSpeed's runner exits 0 where a signal killed the process that it
started (deepspeed/launcher/runner.py 0.19.8: only a positive return code is passed on), and srun reports the
highest status, which is that of the ranks that it ended itself after one had failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import listed
from dslaunch.run.records import first_failed, read_ranks


@dataclass(frozen=True)
class Fault:
    """Why a run did not succeed."""

    why: str
    exit_status: int
    """Of the rank that failed first."""


def fault(folder: Path, expected: int | None) -> Fault | None:
    """What the ranks' own records hold against the run; None where they all ended well.

    Args:
        folder: the run folder.
        expected: ranks that must have a record here; None where other hosts may keep theirs.
    """
    records = read_ranks(folder / "ranks")
    if failed := first_failed(records):
        first = failed[0]
        assert first.status is not None
        others = f" ({len(failed) - 1} more ranks after it)" if failed[1:] else ""
        return Fault(f"rank {first.rank} exits {first.status}{others}", first.status)
    if unfinished := [each.rank for each in records if each.status is None]:
        return Fault(f"rank {listed(unfinished, limit=8)} was killed before it could record its exit status", 1)
    if expected is not None and len(records) < expected:
        return Fault(f"only {len(records)} of {expected} ranks were started", 1)
    return None
