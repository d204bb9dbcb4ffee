"""How each rank ended, as rank.sh records it: RUN/ranks/RANK.exit holds `running`, then the exit status.

A launcher's own exit status is not enough. DeepSpeed's runner exits 0 where a signal killed the process that it
started (deepspeed/launcher/runner.py 0.19.8: only a positive return code is passed on), and srun reports the
highest status, which is that of the ranks that it ended itself after one had failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import listed

_TERMINATED = 143


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
    paths = sorted((folder / "ranks").glob("*.exit"), key=lambda path: path.stat().st_mtime_ns)
    records = {int(path.stem): path.read_text().strip() for path in paths}
    ended = {rank: int(text) for rank, text in records.items() if text.isdigit()}
    # A launcher ends the others with SIGTERM once one has failed: what they exit with is no cause.
    failed = sorted((rank for rank in ended if ended[rank]), key=lambda rank: ended[rank] == _TERMINATED)
    if failed:
        first = failed[0]
        others = f" ({len(failed) - 1} more ranks after it)" if failed[1:] else ""
        return Fault(f"rank {first} exits {ended[first]}{others}", ended[first])
    unfinished = sorted(records.keys() - ended.keys())
    if unfinished:
        return Fault(f"rank {listed(unfinished, limit=8)} was killed before it could record its exit status", 1)
    if expected is not None and len(records) < expected:
        return Fault(f"only {len(records)} of {expected} ranks were started", 1)
    return None
