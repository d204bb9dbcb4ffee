"""A sweep under SLURM: the runs that ask for the same nodes are the tasks of one array job.

A task's number is its run's, and the run folder is SWEEP.TASK, so the array's script needs no list. It goes over
to the run's own job.sbatch, for which the task is a job like any other: SLURM_JOB_ID is the task's own, and so are
its attempts, its requeues and the jobs behind it. Job arrays: sbatch(1), --array; SLURM_ARRAY_TASK_ID.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dslaunch.errors import DslaunchError, LaunchError
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.slurm import submission
from dslaunch.launch.steps import Submit, SubmitArray
from dslaunch.launch.submit import CHAIN, sbatch
from dslaunch.run.folder import write_file
from dslaunch.run.slurm_jobs import cancel
from dslaunch.run.state import append_event, update_state
from dslaunch.run.sweeps import run_folder

_DIRECTIVE = "#SBATCH "
_OF_A_RUN = ("--job-name", "--output")
"""Options that do not tell one array from another: the array has its own."""
_SCRIPT = """#!/bin/bash
{directives}
# {name}: runs of a sweep. Task N is the run in {name}.N beside the sweep's folder.
set -euo pipefail
export DSLAUNCH_RUN_DIR="$DSLAUNCH_SWEEP.$SLURM_ARRAY_TASK_ID"
cd -- "$DSLAUNCH_RUN_DIR"
exec bash "$DSLAUNCH_RUN_DIR/job.sbatch"
"""


def arrays(sweep: Path, requests: Sequence[tuple[int, LaunchRequest]], at_once: int) -> list[SubmitArray]:
    """One array for the runs that ask SLURM for the same, in the order of the first of each.

    Args:
        sweep: the sweep's folder, absolute.
        at_once: tasks of an array that may run at the same time; 0: as many as SLURM starts.
    """
    groups: dict[object, list[tuple[int, LaunchRequest, Submit]]] = {}
    for number, request in requests:
        step = submission(request)
        env = {name: value for name, value in step.env.items() if name != "DSLAUNCH_RUN_DIR"}
        key = (tuple(_directives(request.files["job.sbatch"])), tuple(env.items()), step.passed)
        groups.setdefault(key, []).append((number, request, step))
    return [_array(sweep, group, at_once) for group in groups.values()]


def _submit(step: SubmitArray, echo: Callable[[str], None]) -> list[str]:
    """Queue the array, and behind each task the jobs that go on where it fails: all of them, or none.

    Returns:
        The jobs that were queued.

    Raises:
        ConfigError: SLURM refused one; nothing of the array is left in the queue.
        LaunchError: sbatch gives no answer, or reaches no controller (status 5).
    """
    job = sbatch(step, step.argv, echo, script=step.script)
    jobs = {task: [f"{job}_{task}"] for task in step.runs}
    try:
        for task, alone in step.alone.items():
            for _ in range(alone.continuations):
                jobs[task].append(sbatch(alone, alone.behind(jobs[task][-1]), echo))
    except DslaunchError:
        cancel([job, *(each for chain in jobs.values() for each in chain[1:])])
        raise
    for task, folder in step.runs.items():
        first, *behind = jobs[task]
        write_file(folder / CHAIN, "".join(f"{each}\n" for each in jobs[task]))
        update_state(folder, status="submitted", slurm_job=first, continuations=tuple(behind))
        append_event(folder, "submitted", job=first, **({"continuations": behind} if behind else {}))
    echo(f"array job {job} submitted: {len(step.runs)} runs, tasks {_ranges(step.runs)}")
    return [job, *(each for chain in jobs.values() for each in chain[1:])]


def submit_arrays(steps: Sequence[SubmitArray], sweep: Path, echo: Callable[[str], None]) -> None:
    """All arrays of a sweep, or none; where SLURM refuses one, the folders that were made for them are gone.

    Raises:
        ConfigError: SLURM refused one.
        LaunchError: sbatch gives no answer, or reaches no controller (status 5).
    """
    queued: list[str] = []
    try:
        for step in steps:
            queued += _submit(step, echo)
    except DslaunchError as error:
        if queued:
            cancel(queued)
        if error.status != LaunchError.status:  # else something may be queued all the same, and needs its files
            for folder in [sweep, *(folder for each in steps for folder in each.runs.values())]:
                shutil.rmtree(folder)
        raise


def would_start(steps: Iterable[SubmitArray], echo: Callable[[str], None]) -> int:
    """Have SLURM judge each array, and say when it would start; nothing is queued. Returns 0.

    Raises:
        ConfigError: SLURM would refuse it.
    """
    for step in steps:
        tasks = next(word for word in step.argv if word.startswith("--array="))
        sbatch(step, ("sbatch", "--test-only", tasks), echo, script=step.script)
    return 0


def _array(sweep: Path, group: Sequence[tuple[int, LaunchRequest, Submit]], at_once: int) -> SubmitArray:
    _, request, step = group[0]
    runs = {number: run_folder(sweep, number) for number, _, _ in group}
    limit = f"%{at_once}" if at_once else ""
    options = (
        f"--array={_ranges(runs)}{limit}",
        f"--job-name={sweep.name}",
        "--chdir", str(sweep),
        "--output", f"{str(sweep).replace('%', '%%')}.%a/logs/slurm-%A_%a.out",
        "--export=ALL",
    )  # fmt: skip
    env = {name: value for name, value in step.env.items() if name != "DSLAUNCH_RUN_DIR"}
    lines = "\n".join(_DIRECTIVE + line for line in _directives(request.files["job.sbatch"]))
    return SubmitArray(
        argv=("sbatch", "--parsable", *options),
        script=_SCRIPT.format(directives=lines, name=sweep.name),
        env={**env, "DSLAUNCH_SWEEP": str(sweep)},
        passed=step.passed,
        runs=runs,
        alone={number: each for number, _, each in group},
    )


def _directives(job: str) -> list[str]:
    """The options of a job script, as they stand after `#SBATCH `, but for those of a single run."""
    found = [line.removeprefix(_DIRECTIVE) for line in job.splitlines() if line.startswith(_DIRECTIVE)]
    return [line for line in found if not line.startswith(_OF_A_RUN)]


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as sbatch's --array takes them: 1-3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
