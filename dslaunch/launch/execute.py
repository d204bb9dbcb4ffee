"""The one executor of steps. It alone starts programs, and keeps the run's state and events."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.follow import follow
from dslaunch.launch.steps import Execute, Follow, RecordCode, Step, Submit, WriteFiles
from dslaunch.run.code import record_code
from dslaunch.run.folder import write_files
from dslaunch.run.processes import Process
from dslaunch.run.ranks import fault
from dslaunch.run.state import State, append_event, read_state, update_state, write_state
from dslaunch.run.supervise import Ended, supervise

_SUBMIT_LIMIT_S = 120.0
_NO_CONTROLLER = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source", re.IGNORECASE
)
"""What sbatch says where no slurmctld answers (SLURM 22.05.8, run)."""


def execute(steps: Sequence[Step], run_dir: Path, launcher: str, echo: Callable[[str], None]) -> int:
    """Execute the steps in order; returns 0 where the job succeeded or was submitted, 1 where it failed.

    Raises:
        ConfigError: SLURM refused the job, and the run folder is gone; or a file cannot be written.
        LaunchError: a command could not be started, or no SLURM controller answers (status 5; no run folder left).
    """
    status = 0
    for step in steps:
        match step:
            case WriteFiles():
                write_files(step.folder, step.files)
                write_state(run_dir, State(run_dir.name, launcher, "prepared"))
                append_event(run_dir, "prepared", launcher=launcher, files=sorted(step.files))
            case RecordCode():
                record_code(step.folder, step.source)
            case Execute():
                status = _execute(step, run_dir, echo)
            case Submit():
                _submit(step, run_dir, echo)
            case Follow():
                status = _follow(run_dir, echo)
    return status


def free_port() -> int:
    """A TCP port that no process of this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _execute(step: Execute, run_dir: Path, echo: Callable[[str], None]) -> int:
    port = {step.free_port: str(free_port())} if step.free_port else {}
    shell = {name: value for name, value in os.environ.items() if name not in step.unset}
    env = {**shell, **step.env, **port}

    def started(process: Process) -> None:
        update_state(run_dir, status="running", process=process)
        append_event(run_dir, "started", argv=step.argv, pid=process.pid, **port)

    ended = supervise(step.argv, step.cwd, env, step.log, sys.stdout.buffer, started)
    status, why = _judge(ended, run_dir, step)
    outcome = "stopped" if ended.stopped_by else "failed" if why else "finished"
    update_state(run_dir, status=outcome, exit_status=status)
    append_event(run_dir, outcome, exit_status=status, why=why, left_over=ended.left_over)
    if ended.survivors:
        echo(f"still running after SIGKILL: process {', '.join(map(str, ended.survivors))}")
    if not why:
        return 0
    echo(f"the job {outcome}: {why}. Its output is in {step.log}")
    return 1


def _judge(ended: Ended, run_dir: Path, step: Execute) -> tuple[int, str]:
    """The exit status, and why the job did not succeed; an empty text where it did."""
    if ended.stopped_by:
        return ended.status, f"{ended.stopped_by} ended it"
    found = fault(run_dir, step.ranks if ended.status == 0 else None)
    if found is not None:
        return found.exit_status, found.why
    return ended.status, f"{' '.join(step.argv)} exits {ended.status}" if ended.status else ""


def _submit(step: Submit, run_dir: Path, echo: Callable[[str], None]) -> None:
    env = {**{name: os.environ[name] for name in step.passed}, **step.env}
    try:
        done = subprocess.run(
            step.argv,
            cwd=step.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SUBMIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        update_state(run_dir, status="failed")
        raise LaunchError(f"sbatch: {error}. Ask squeue whether the job is queued") from error
    if done.returncode:
        shutil.rmtree(run_dir)
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
    job = done.stdout.strip().split(";")[0]
    update_state(run_dir, status="submitted", slurm_job=job)
    append_event(run_dir, "submitted", job=job)
    echo(f"job {job} submitted; its output goes to {run_dir}/logs/slurm-{job}.out")


def _follow(run_dir: Path, echo: Callable[[str], None]) -> int:
    job = read_state(run_dir).slurm_job
    try:
        end = follow(job, run_dir / "logs" / f"slurm-{job}.out", sys.stdout.buffer, echo)
    except KeyboardInterrupt:
        echo(f"job {job} goes on. To end it: scancel {job}")
        return 0
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
