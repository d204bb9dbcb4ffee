"""What SLURM says of a job, and how it is told to end one."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dslaunch.errors import LaunchError

_COMMAND_LIMIT_S = 60.0
_STEP_LIMIT_S = 20.0
_POLL_S = 0.5
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


def own_job(environ: Mapping[str, str]) -> str:
    """The id by which SLURM takes this job alone: ARRAY_TASK for a task of an array.

    One task of an array has the array's id for its own SLURM_JOB_ID, by which SLURM means every task.
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


def ask(job: str) -> JobState:
    """What the controller, or else the accounting, says of a job.

    Raises:
        LaunchError: SLURM answers that it does not know the job.
    """
    answer = _answer("scontrol", "show", "job", "--oneliner", job)
    if answer.returncode == 0:
        # A heterogeneous job is a line a component; the first has the batch script, whose end is the job's.
        fields = dict(_FIELD.findall(answer.stdout.splitlines()[0]))
        return JobState(fields["JobState"], fields["Reason"], _exit_status(fields["ExitCode"]))
    if "Invalid job id" not in answer.stderr:
        return JobState("no answer", "; ".join(answer.stderr.split("\n")).strip("; "), 0)
    # The controller forgets a job some minutes after its end (MinJobAge).
    form = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode")
    row = _answer("sacct", *form, "-j", job).stdout.strip()
    if not row:
        raise LaunchError(
            f"job {job}: SLURM no longer knows it, and there is no accounting, so its end is not known. Look at "
            "the log in the run folder"
        )
    state, exit_code = row.splitlines()[0].split("|")
    return JobState(state.split()[0], "", _exit_status(exit_code))


def components(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The ids of this job's components where it is heterogeneous: SLURM lists and ends the steps of each apart."""
    count = int(environ.get("SLURM_HET_SIZE", "0"))
    return tuple(environ[f"SLURM_JOB_ID_HET_GROUP_{at}"] for at in range(count))


def end_steps(jobs: Sequence[str]) -> bool:
    """SIGKILL to each step of running jobs but a batch script's own; whether SLURM sees the end of all.

    A rank that is stopped outlives srun, which is ended before the rank is. Of a step on a node that is down SLURM
    never hears.
    """
    deadline = time.monotonic() + _STEP_LIMIT_S
    listing = ("squeue", "--noheader", "--steps", "--format=%i", "--jobs", ",".join(jobs))
    while steps := re.findall(r"^\d+(?:_\d+)?\.\d+$", _answer(*listing).stdout, re.MULTILINE):
        if time.monotonic() > deadline:
            return False
        _answer("scancel", "--signal=KILL", *steps)
        time.sleep(_POLL_S)
    return True


def signal_steps(job: str) -> None:
    """SIGTERM to every rank of a running job, and not to its batch script, which goes on to its end."""
    _answer("scancel", "--signal=TERM", job)


def _answer(*argv: str) -> subprocess.CompletedProcess[str]:
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


def cancel(jobs: Sequence[str]) -> None:
    """Have SLURM end these jobs: SIGTERM to their ranks, SIGKILL after the cluster's KillWait.

    Raises:
        LaunchError: scancel fails.
    """
    done = _answer("scancel", *jobs)
    if done.returncode:
        raise LaunchError(
            f"scancel {' '.join(jobs)}: {done.stderr.strip() or done.returncode}. The job may still run: ask "
            f"`squeue -j {','.join(jobs)}`"
        )
