"""Attempts: starts of the same rendered files in the same run folder. The first is the launch.

    RUN/ranks                 how the ranks of the newest attempt stand and ended
    RUN/ranks.attempt-K       the same of attempt K, once another has begun
    RUN/logs                  what attempt 1 said
    RUN/logs/attempt-N        what attempt N said, N > 1

job.sbatch does the same in the shell, for jobs that SLURM starts again by itself.
"""

from __future__ import annotations

import time
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.run.find import word_for
from dslaunch.run.state import append_event, update_state

_BEGINS_WITHIN_S = 60.0


def attempt_of(folder: Path) -> int:
    """The number of the newest attempt, counted from 1."""
    return 1 + sum(1 for _ in folder.glob("ranks.attempt-*"))


def logs_of(folder: Path, attempt: int) -> Path:
    """Where that attempt's logs stand."""
    return folder / "logs" if attempt == 1 else folder / "logs" / f"attempt-{attempt}"


def begin_attempt(folder: Path, why: str) -> int:
    """Put the records of the newest attempt aside, and make room for one more; returns its number.

    The caller hands the number to every rank as DSLAUNCH_ATTEMPT; rank.sh sets DSLAUNCH_RESUME from it.

    Raises:
        ConfigError: another command is doing the same.
    """
    ended = attempt_of(folder)
    logs = logs_of(folder, ended + 1)
    try:
        logs.mkdir()
    except FileExistsError as error:
        if not _abandoned(logs):
            raise ConfigError(
                f"{logs}: exists, so another command is starting attempt {ended + 1} of this run right now. Look: "
                f"dslaunch status {word_for(folder)}"
            ) from error
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    ranks.rename(folder / f"ranks.attempt-{ended}")
    update_state(folder, attempt=ended + 1)
    append_event(folder, "attempt", number=ended + 1, why=why)
    return ended + 1


def _abandoned(logs: Path) -> bool:
    """Whether the command that made the folder was killed before it put the records aside."""
    return not any(logs.iterdir()) and time.time() - logs.stat().st_mtime > _BEGINS_WITHIN_S
