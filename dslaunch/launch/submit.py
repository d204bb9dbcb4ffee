"""Hand a job to SLURM, with the jobs that go on where it fails, and follow them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dslaunch.errors import ConfigError, DslaunchError, LaunchError
from dslaunch.launch.follow import follow
from dslaunch.launch.steps import Step, Submit, SubmitArray
from dslaunch.run.find import word_for
from dslaunch.run.folder import write_file
from dslaunch.run.now import refused
from dslaunch.run.ranks import fault
from dslaunch.run.slurm_jobs import JobState, cancel
from dslaunch.run.state import append_event, read_state, update_state

_SUBMIT_LIMIT_S = 120.0
_NO_CONTROLLER = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source", re.IGNORECASE
)
"""What sbatch says where no slurmctld answers (SLURM 22.05.8, run)."""
CHAIN = "job.chain"
"""A file with the jobs of a submission, one a line: job.sbatch takes back those that have nothing left to do."""


def submit(step: Submit, run_dir: Path, echo: Callable[[str], None]) -> None:
    """Queue the job, and behind it those that go on where the one before fails: all of them, or none.

    Raises:
        ConfigError: SLURM refused one; a run folder that was made for them is gone.
        LaunchError: sbatch gives no answer, or reaches no controller (status 5; the folder is gone likewise).
    """
    jobs: list[str] = []
    try:
        for number in range(1 + step.continuations):
            jobs.append(sbatch(step, step.behind(jobs[-1]) if number else step.argv, echo))
    except DslaunchError as error:
        if jobs:
            cancel(jobs[::-1])
        if step.fresh and error.status != LaunchError.status:
            shutil.rmtree(run_dir)
        else:  # it may be queued all the same, and needs its files
            update_state(run_dir, status="failed")
        raise
    write_file(run_dir / CHAIN, "".join(f"{job}\n" for job in jobs))
    job, *behind = jobs
    update_state(run_dir, status="submitted", slurm_job=job, continuations=tuple(behind))
    append_event(run_dir, "submitted", job=job, **({"continuations": behind} if behind else {}))
    echo(f"job {job} submitted; its output goes to {run_dir}/logs/slurm-{job}.out")
    if behind:
        echo(f"queued behind it, each to go on where the one before fails: job {', '.join(behind)}")


def would_start(steps: Sequence[Step], files: Mapping[str, str], echo: Callable[[str], None]) -> int:
    """Have SLURM judge the job, and say when it would start on which nodes; nothing is queued. Returns 0.

    Raises:
        ConfigError: SLURM would refuse it, or nothing is to be submitted.
        LaunchError: sbatch gives no answer, or reaches no controller (status 5).
    """
    submits = [step for step in steps if isinstance(step, Submit)]
    if not submits:
        raise ConfigError(
            "--test-only: nothing is handed to SLURM here, which alone could answer. Take it out, or give "
            "launcher=slurm"
        )
    # The script comes from stdin, since no run folder is made; neither is the folder that the job would run in.
    sbatch(submits[0], ("sbatch", "--test-only"), echo, script=files["job.sbatch"])
    return 0


def sbatch(step: Submit | SubmitArray, argv: Sequence[str], echo: Callable[[str], None], script: str = "") -> str:
    """The job's id; what sbatch says beside it is told.

    Args:
        script: the job's script, where `argv` names no file.

    Raises:
        ConfigError: SLURM refused it.
        LaunchError: sbatch gives no answer, or reaches no controller (status 5).
    """
    env = {**{name: os.environ[name] for name in step.passed}, **step.env}
    try:
        done = subprocess.run(
            argv,
            cwd=None if script or isinstance(step, SubmitArray) else step.cwd,
            env=env,
            input=script,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SUBMIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch: {error}. Ask squeue whether the job is queued") from error
    if done.returncode:
        if _NO_CONTROLLER.search(done.stderr):
            raise LaunchError(
                "nothing was launched: sbatch reaches no SLURM controller. Ask `scontrol ping`, or "
                "launch on a login node of the cluster",
                status=5,
            )
        message = done.stderr.strip() or f"exit status {done.returncode}"
        raise ConfigError(
            f"{message}\nsbatch refused the job; nothing was queued. Change launcher.slurm.* and try again"
        )
    if done.stderr:
        echo(done.stderr.strip())
    return done.stdout.strip().split(";")[0]


def follow_jobs(run_dir: Path, echo: Callable[[str], None]) -> int | None:
    """Show the logs of the submitted jobs, one after the other, until one succeeds or the last has ended.

    Returns:
        0 where the run succeeded, 1 where it failed; None where the user stops looking.
    """
    state = read_state(run_dir)
    job, behind = state.slurm_job, list(state.continuations)
    try:
        end = _shown(job, run_dir, echo)
        while behind and not end.succeeded and end.state != "CANCELLED" and not refused(run_dir):
            job = behind.pop(0)
            end = _shown(job, run_dir, echo)
    except KeyboardInterrupt:
        echo(f"job {job} goes on. To end it: dslaunch stop {word_for(run_dir)}")
        return None
    return _recorded(job, end, run_dir, echo)


def _shown(job: str, run_dir: Path, echo: Callable[[str], None]) -> JobState:
    return follow(job, run_dir / "logs" / f"slurm-{job}.out", sys.stdout.buffer, echo)


def _recorded(job: str, end: JobState, run_dir: Path, echo: Callable[[str], None]) -> int:
    outcome = "finished" if end.succeeded else "stopped" if end.state == "CANCELLED" else "failed"
    found = fault(run_dir, None) if outcome == "failed" else None
    status = found.exit_status if found else end.exit_status
    update_state(run_dir, status=outcome, exit_status=status)
    append_event(run_dir, outcome, job=job, state=end.state, exit_status=status, why=found.why if found else "")
    if end.succeeded:
        return 0
    why = found.why if found else f"exit status {status}"
    echo(f"job {job} ended as {end.state}: {why}. Its output is in {run_dir}/logs")
    return 1
