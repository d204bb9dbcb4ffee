"""How each rank ended, as rank.sh records it: RUN/ranks/RANK.exit holds `running`, then the exit status.

An exit status of 0 from a launcher is not enough: DeepSpeed's runner exits 0 where a signal killed the
process that it started (deepspeed/launcher/runner.py 0.19.8: only a positive return code is passed on).
"""

from __future__ import annotations

from pathlib import Path

from dslaunch.errors import listed


def fault(folder: Path, expected: int | None) -> str:
    """Why the run did not succeed by its ranks' own records; empty where they all ended well.

    Args:
        folder: the run folder.
        expected: ranks that must have a record here; None where other hosts may keep theirs.
    """
    records = {int(path.stem): path.read_text().strip() for path in (folder / "ranks").glob("*.exit")}
    failed = {rank: text for rank, text in sorted(records.items()) if text not in ("0", "running")}
    if failed:
        return "exit status " + listed((f"{text} on rank {rank}" for rank, text in failed.items()), limit=8)
    unfinished = sorted(rank for rank, text in records.items() if text == "running")
    if unfinished:
        return f"rank {listed(unfinished, limit=8)} was killed before it could record its exit status"
    if expected is not None and len(records) < expected:
        return f"only {len(records)} of {expected} ranks were started"
    return ""
