"""The launch of a sweep: array jobs where SLURM is handed its runs, and elsewhere one run after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError, listed
from dslaunch.launch import How, code_steps, launch
from dslaunch.launch.array import arrays, submit_arrays, would_start
from dslaunch.launch.checks import check, check_machine
from dslaunch.launch.choose import choose
from dslaunch.launch.execute import execute
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Step, SubmitArray
from dslaunch.launch.submit import follow_jobs
from dslaunch.planfile import Plan
from dslaunch.run.find import word_for
from dslaunch.run.folder import create_at
from dslaunch.run.state import read_state
from dslaunch.run.sweeps import Sweep, SweepRun, run_folder, sweep_folder, write_sweep


@dataclass(frozen=True)
class Planned:
    """One run of a sweep, as planned and rendered."""

    run: SweepRun
    plan: Plan
    files: Mapping[str, str]


def launch_sweep(runs: Sequence[Planned], sweep: Sweep, root: Path, at_once: int, how: How) -> int:
    """Launch every run in a folder of its own, named after the sweep's.

    Args:
        sweep: all runs, the refused ones too.
        root: run.root.
        at_once: tasks of an array job that may run at the same time; 0: as many as SLURM starts.

    Returns:
        0 where all did well or were submitted, else 1.

    Raises:
        ConfigError, LaunchError: as a launch.
    """
    folder = sweep_folder(root, runs[0].plan.name)
    launchers = {choose(each.plan, os.environ) for each in runs}
    arrays_allowed = not any(each.plan.cluster.kinds for each in runs)  # SLURM has none of heterogeneous jobs
    if launchers == {"slurm"} and not os.environ.get("SLURM_JOB_ID") and arrays_allowed:
        return _through_slurm(runs, sweep, folder, at_once, how)
    if how.detach:
        raise ConfigError(
            "--detach: the runs of a sweep come one after the other, and this command waits between them. Leave "
            "it out"
        )
    if not (how.dry_run or how.test_only):
        write_sweep(folder, sweep)
        how.echo(f"sweep {folder.name}: {len(runs)} runs, one after the other")
    return _one_by_one(runs, folder, root, how)


def _one_by_one(runs: Sequence[Planned], sweep: Path, root: Path, how: How) -> int:
    failed = []
    for place, each in enumerate(runs, 1):
        how.echo(f"run {each.run.number} ({place} of {len(runs)}): {' '.join(each.run.values)}")
        where = run_folder(sweep, each.run.number)
        if launch(each.plan, each.files, root, how, run_dir=where):
            if read_state(where).status == "stopped":
                left = len(runs) - place
                how.echo(f"the sweep ends here: run {each.run.number} was stopped, and {left} were not begun")
                return 1
            failed.append(each.run.number)
    if failed:
        how.echo(f"of {len(runs)} runs, {listed(failed)} failed")
    return 1 if failed else 0


def _through_slurm(runs: Sequence[Planned], sweep: Sweep, folder: Path, at_once: int, how: How) -> int:
    requests = [(each.run.number, _request(each, folder, how)) for each in runs]
    for _, request in requests:
        check(request, "slurm")
    if how.detach:
        raise ConfigError("--detach: a job that SLURM runs goes on without this shell. Leave --detach out")
    steps = arrays(folder, requests, at_once)
    if how.test_only:
        return would_start(steps, how.echo)
    if how.dry_run:
        _describe(requests, steps, how)
        return 0
    for _, request in requests:
        check_machine(request, "slurm")
    _ask(runs, how)
    write_sweep(folder, sweep)
    how.echo(f"sweep {folder.name}: {len(runs)} runs as {len(steps)} array jobs")
    for _, request in requests:
        create_at(request.run_dir)
        execute(code_steps(request, None), request.run_dir, "slurm", how.echo)
    submit_arrays(steps, folder, how.echo)
    word = word_for(folder)
    how.echo(f"dslaunch status {word} | logs {word} | compare {word} | stop {word}")
    return _followed([request.run_dir for _, request in requests], how) if how.wait else 0


def _followed(folders: Sequence[Path], how: How) -> int:
    """Show one run after the other, to its end or until the user stops looking; 1 where one failed."""
    worst = 0
    for folder in folders:
        status = follow_jobs(folder, how.echo)
        if status is None:
            break
        worst = max(worst, status)
    return worst


def _request(each: Planned, sweep: Path, how: How) -> LaunchRequest:
    where = run_folder(sweep, each.run.number)
    asked = not how.skip_preflight
    return LaunchRequest(each.plan, each.files, where, Path.cwd(), os.environ, how.wait, preflight=asked)


def _describe(
    requests: Sequence[tuple[int, LaunchRequest]], steps: Sequence[SubmitArray], how: How
) -> None:
    written: list[Step] = [step for _, request in requests for step in code_steps(request, None)]
    for step in [*written, *steps]:
        how.echo(step.describe())


def _ask(runs: Sequence[Planned], how: How) -> None:
    gpus = sum(each.plan.world_size for each in runs)
    if how.confirm is None or gpus <= min(each.plan.launcher.confirm_above for each in runs):
        return
    if not how.confirm(f"Launch {len(runs)} runs on {gpus} GPUs in all (slurm)?"):
        raise LaunchError("Nothing was launched, and nothing was written: the answer was no", status=5)
