"""Launching: choose a launcher, check, prepare its steps, then print or execute that list."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch import kubernetes, local, openmpi, slurm, ssh, torchrun
from dslaunch.launch.before import before_launch, step_of
from dslaunch.launch.checks import check, check_machine
from dslaunch.launch.choose import choose
from dslaunch.launch.detach import check_detached, run_steps
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.stage import pack_step
from dslaunch.launch.steps import RecordCode, Step, WriteFiles
from dslaunch.launch.submit import would_start
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.run.folder import create, create_at, planned, verify

PREPARE: dict[str, Callable[[LaunchRequest], list[Step]]] = {
    "local": local.prepare,
    "torchrun": torchrun.prepare,
    "ssh": ssh.prepare,
    "openmpi": openmpi.prepare,
    "slurm": slurm.prepare,
    "kubernetes": kubernetes.prepare,
}
LAUNCHERS = ("auto", *PREPARE)


@dataclass(frozen=True)
class How:
    """How a launch is to go about it: what was typed beside the description."""

    echo: Callable[[str], None]
    """Where it says what it does."""
    confirm: Callable[[str], bool] | None = None
    """Asks the user about a large launch; None does not ask."""
    wait: bool = False
    """Follow a submitted job to its end."""
    dry_run: bool = False
    """Print the steps instead of executing them; nothing is written."""
    detach: bool = False
    """Return once the job runs; it goes on without this shell."""
    skip_preflight: bool = False
    """Start without asking the hosts how they are."""
    test_only: bool = False
    """Have SLURM say whether and when it would start the job; nothing is queued or written."""


def launch(
    plan: Plan,
    files: Mapping[str, str],
    run_root: Path,
    how: How,
    source: Path | None = None,
    run_dir: Path | None = None,
) -> int:
    """Put `files` into a run folder of their own under `run_root` and start the job.

    Args:
        source: the reviewed folder that `files` are the verified texts of.
        run_dir: the run folder that is to be made, where a sweep names it.

    Returns:
        0 where the job succeeded, was submitted or runs detached; 1 where it failed.

    Raises:
        ConfigError: a mistake found before anything ran, or SLURM refused the job; no run folder is left.
        LaunchError: nothing here can launch the plan, or the user said no (status 5); preflight failed (status 4).
    """
    launcher = choose(plan, os.environ)
    folder, asked = run_dir or planned(run_root, plan.name), not how.skip_preflight
    request = LaunchRequest(plan, files, folder, Path.cwd(), os.environ, how.wait, preflight=asked)
    check(request, launcher)
    steps = _steps(request, launcher, source)
    check_detached(how.detach, steps)
    if how.test_only:
        return would_start(steps, files, how.echo)
    if how.dry_run:
        if asked and (step := step_of(request, launcher)):
            how.echo(step)
        for each in steps:
            how.echo(each.describe())
        if not launcher:
            how.echo(
                f"{_not_here(request.plan)} To launch it, type on a login node of it\n"
                f"  dslaunch launch DIR launcher=slurm\nwith the folder that `dslaunch render ... -o DIR` wrote."
            )
        return 0
    check_machine(request, launcher)
    _ask(plan, launcher, how.confirm)
    before_launch(request, launcher, how.echo, skip=how.skip_preflight)
    made = create_at(run_dir) if run_dir else create(run_root, plan.name)
    request = replace(request, run_dir=made)
    how.echo(f"run folder: {request.run_dir}")
    steps = _steps(request, launcher, source)
    status = run_steps(steps, request.run_dir, launcher, how.echo, detach=how.detach)
    if not launcher:
        raise LaunchError(_next_command(request), status=5)
    return status


def launch_folder(folder: Path, run_root: Path, how: How, *, launcher: str = "") -> int:
    """Launch exactly what `folder` holds, once its hashes prove that it is what was rendered.

    Args:
        launcher: who starts the ranks, where the plan's own choice does not suit this machine.

    Raises:
        ConfigError: a file differs, or is missing; and what `launch` raises.
    """
    plan, files = folder_plan(folder, launcher)
    return launch(plan, files, run_root, how, source=folder.absolute())


def folder_plan(folder: Path, launcher: str) -> tuple[Plan, dict[str, str]]:
    """The plan and the texts of a rendered folder, once its hashes prove that it is what was rendered.

    Args:
        launcher: in place of the plan's own; empty keeps it.

    Raises:
        ConfigError: a file differs, or is missing, or names no launcher.
    """
    files = verify(folder)
    plan = plan_from_json(files["plan.json"], str(folder / "plan.json"))
    if plan.launcher.name not in LAUNCHERS:
        raise ConfigError(
            f"{folder / 'plan.json'}.launcher.name: {plan.launcher.name!r} is no launcher; allowed are "
            f"{', '.join(LAUNCHERS)}. Render again"
        )
    if launcher:
        plan = replace(plan, launcher=replace(plan.launcher, name=launcher))
    return plan, files


def _steps(request: LaunchRequest, launcher: str, source: Path | None) -> list[Step]:
    return code_steps(request, source) + (PREPARE[launcher](request) if launcher else [])


def code_steps(request: LaunchRequest, source: Path | None) -> list[Step]:
    """What every launch begins with: its files in the run folder, and which code it runs."""
    script = request.plan.program.script
    code = request.absolute(script).parent if script else request.work_dir
    packed = pack_step(request)
    return [
        WriteFiles(request.run_dir, request.files, request.work_dir, source),
        RecordCode(request.run_dir, code),
        *([packed] if packed else []),
    ]


def _ask(plan: Plan, launcher: str, confirm: Callable[[str], bool] | None) -> None:
    if confirm is None or not launcher or plan.world_size <= plan.launcher.confirm_above:
        return
    if not confirm(f"Launch {plan.name} on {plan.world_size} GPUs ({launcher})?"):
        raise LaunchError("Nothing was launched, and nothing was written: the answer was no", status=5)


def _next_command(request: LaunchRequest) -> str:
    folder = shlex.quote(str(request.run_dir))
    return f"{_not_here(request.plan)} On a login node of it, type\n  dslaunch launch {folder} launcher=slurm"


def _not_here(plan: Plan) -> str:
    cluster = plan.cluster
    return (
        f"Nothing is launched: this machine is not the cluster ({cluster.nodes} nodes x {cluster.gpus_per_node} "
        f"{cluster.gpu}), no SLURM controller answers, and no hostfile is named."
    )
