"""Follow a submitted SLURM job: its log as it grows, its states, its end."""

from __future__ import annotations

import re
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
_FIELD = re.compile(r"\b(JobState|Reason|ExitCode)=(\S+)")
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """A job as SLURM reports it."""

    state: str
    """Such as PENDING, RUNNING, COMPLETED, FAILED; `no answer` where SLURM gives none for now."""
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


def ask(job: str) -> JobState:
    """What the controller, or else the accounting, says of a job.

    Raises:
        LaunchError: SLURM answers that it does not know the job.
    """
    answer = _run("scontrol", "show", "job", "--oneliner", job)
    if answer.returncode == 0:
        fields = dict(_FIELD.findall(answer.stdout))
        return JobState(fields["JobState"], fields["Reason"], _exit_status(fields["ExitCode"]))
    if "Invalid job id" not in answer.stderr:
        return JobState("no answer", answer.stderr.strip(), 0)
    # The controller forgets a job some minutes after its end (MinJobAge).
    form = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode")
    row = _run("sacct", *form, "-j", job).stdout.strip()
    if not row:
        raise LaunchError(
            f"job {job}: SLURM no longer knows it, and there is no accounting, so its end is not known. Look at "
            "the log in the run folder"
        )
    state, exit_code = row.splitlines()[0].split("|")
    return JobState(state.split()[0], "", _exit_status(exit_code))


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    """A SLURM command's answer; one that cannot be had is a failed one."""
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, returncode=1, stdout="", stderr=str(error))


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
