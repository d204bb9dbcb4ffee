"""Follow a submitted SLURM job: its log as it grows, its states, its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dslaunch.run.slurm_jobs import JobState, ask

_LOG_EVERY_S = 1.0
_ASK_AT_MOST_EVERY_S = 30.0


def follow(job: str, log: Path, out: BinaryIO, echo: Callable[[str], None]) -> JobState:
    """Copy the job's log to `out` and report each new state, until the job ended.

    Raises:
        LaunchError: SLURM no longer knows the job.
        KeyboardInterrupt: the user stops looking; the job goes on.
    """
    shown, told = 0, ""
    pause = _LOG_EVERY_S
    while True:
        now = ask(job)
        words = now.state if now.reason in ("", "None") or now.ended else f"{now.state} ({now.reason})"
        if words != told:
            echo(f"job {job}: {words}")
            told, pause = words, _LOG_EVERY_S
        next_ask = time.monotonic() + pause
        pause = min(2 * pause, _ASK_AT_MOST_EVERY_S)
        shown = _copy_from(log, shown, out)
        if now.ended:
            return now
        while time.monotonic() < next_ask:
            time.sleep(_LOG_EVERY_S)
            shown = _copy_from(log, shown, out)


def _copy_from(log: Path, offset: int, out: BinaryIO) -> int:
    """Copy what the log holds after `offset`; returns the new offset."""
    if not log.exists():
        return offset
    with log.open("rb") as stream:
        stream.seek(offset)
        new = stream.read()
    out.write(new)
    out.flush()
    return offset + len(new)
