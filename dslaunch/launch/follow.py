"""Follow a submitted SLURM job: its log as it grows, its states, its end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dslaunch.errors import LaunchError

_LOG_EVERY_S = 1.0
_ASK_AT_MOST_EVERY_S = 30.0
_COMMAND_LIMIT_S = 60.0
_MISSES = 10
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """A job as SLURM reports it."""

    state: str
    """Such as PENDING, RUNNING, COMPLETED, FAILED."""
    reason: str
    exit_status: int
    """Of the batch script; 128 + N where signal N ended it."""

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def succeeded(self) -> bool:
        return self.state == "COMPLETED" and self.exit_status == 0


def follow(job: str, log: Path, out: BinaryIO, echo: Callable[[str], None]) -> JobState:
    """Copy the job's log to `out` and report each new state, until the job ended.

    Raises:
        LaunchError: SLURM no longer knows the job, or does not answer.
        KeyboardInterrupt: the user stops looking; the job goes on.
    """
    shown, told = 0, ""
    pause = _LOG_EVERY_S
    while True:
        now = _ask_patiently(job)
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


def ask(job: str) -> JobState | None:
    """What the controller, or else the accounting, says of a job; None where neither knows it."""
    line = _output("scontrol", "show", "job", "--oneliner", job)
    if line:
        # Values may hold blanks, and a user's (JobName, Comment) even `=`: the three needed here come
        # with the first occurrence of their name, and only JobName stands before them.
        fields = dict(word.split("=", 1) for word in reversed(line.split()) if "=" in word)
        return JobState(fields["JobState"], fields["Reason"], _exit_status(fields["ExitCode"]))
    row = _output("sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", "-j", job)
    if not row:
        return None
    state, exit_code = row.splitlines()[0].split("|")
    return JobState(state.split()[0], "", _exit_status(exit_code))


def _ask_patiently(job: str) -> JobState:
    """A busy controller may miss an answer; ten in a row are an error."""
    for _ in range(_MISSES):
        state = ask(job)
        if state is not None:
            return state
        time.sleep(_LOG_EVERY_S)
    raise LaunchError(
        f"job {job}: SLURM does not report it any more, so its end is not known. Ask `sacct -j {job}`, or "
        "look "
        "at the log in the run folder"
    )


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _exit_status(code: str) -> int:
    """SLURM's `STATUS:SIGNAL` as a shell would report it."""
    status, sign = (int(part) for part in code.split(":"))
    return 128 + sign if sign else status


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
