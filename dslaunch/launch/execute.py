"""The one executor of steps. It starts programs, and keeps the run's state and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from dslaunch.errors import LaunchError
from dslaunch.launch.kubernetes import create
from dslaunch.launch.stage import pack, stage, unstage
from dslaunch.launch.steps import (
    Create,
    Execute,
    Follow,
    Pack,
    RecordCode,
    Stage,
    Step,
    Submit,
    WriteFiles,
)
from dslaunch.launch.submit import follow_jobs, submit
from dslaunch.launch.supervised import run_attempts
from dslaunch.planfile import plan_from_json
from dslaunch.run.agent import free_port
from dslaunch.run.code import record_code
from dslaunch.run.folder import write_files
from dslaunch.run.state import State, append_event, update_state, write_state


def execute(steps: Sequence[Step], run_dir: Path, launcher: str, echo: Callable[[str], None]) -> int:
    """Execute the steps in order; returns 0 where the job succeeded or was submitted, 1 where it failed.

    Raises:
        ConfigError: SLURM refused the job, and the run folder is gone; or a file cannot be written.
        LaunchError: a command could not be started, or no SLURM controller answers (status 5; no run folder left).
    """
    with ExitStack() as afterwards:
        return _execute_all(steps, run_dir, launcher, echo, afterwards)


def _execute_all(
    steps: Sequence[Step], run_dir: Path, launcher: str, echo: Callable[[str], None], afterwards: ExitStack
) -> int:
    status = 0
    for step in steps:
        match step:
            case WriteFiles():
                write_files(step.folder, step.files)
                write_state(run_dir, State(run_dir.name, launcher, "prepared", work_dir=str(step.work_dir)))
                append_event(run_dir, "prepared", launcher=launcher, files=sorted(step.files))
            case RecordCode():
                record_code(step.folder, step.source)
            case Pack():
                pack(step, echo)
            case Stage():
                _stage(step, run_dir, echo)
                afterwards.callback(unstage, step, echo)
            case Execute():
                status = _execute(step, run_dir, echo)
            case Submit():
                submit(step, run_dir, echo)
            case Create():
                create(step, run_dir, echo)
            case Follow():
                status = follow_jobs(run_dir, echo) or 0
    return status


def _stage(step: Stage, run_dir: Path, echo: Callable[[str], None]) -> None:
    try:
        stage(step, echo)
    except LaunchError as error:
        update_state(run_dir, status="failed")
        append_event(run_dir, "failed", why=str(error))
        raise


def _execute(step: Execute, run_dir: Path, echo: Callable[[str], None]) -> int:
    where = run_dir / "plan.json"
    plan = plan_from_json(where.read_text(encoding="utf-8"), str(where))
    return run_attempts(step, plan, run_dir, free_port, echo)
