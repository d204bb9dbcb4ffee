"""Launching: choose a launcher, check, prepare its steps, then print or execute that list."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch import local, slurm, ssh, torchrun
from dslaunch.launch.checks import check, check_machine
from dslaunch.launch.choose import choose
from dslaunch.launch.execute import execute
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import RecordCode, Step, WriteFiles
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.run.folder import create, planned, verify

_PREPARE: dict[str, Callable[[LaunchRequest], list[Step]]] = {
    "local": local.prepare,
    "torchrun": torchrun.prepare,
    "ssh": ssh.prepare,
    "slurm": slurm.prepare,
}
LAUNCHERS = ("auto", *_PREPARE)


def launch(
    plan: Plan,
    files: Mapping[str, str],
    run_root: Path,
    *,
    wait: bool,
    dry_run: bool,
    echo: Callable[[str], None],
    confirm: Callable[[str], bool] | None,
    source: Path | None = None,
) -> int:
    """Put `files` into a run folder of their own under `run_root` and start the job.

    Args:
        wait: follow a submitted job to its end.
        dry_run: print the steps instead of executing them; nothing is written.
        confirm: asks the user about a large launch; None does not ask.
        source: the reviewed folder that `files` are the verified texts of.

    Returns:
        0 where the job succeeded or was submitted, 1 where it failed.

    Raises:
        ConfigError: a mistake found before anything ran, or SLURM refused the job; no run folder is left.
        LaunchError: nothing here can launch the plan, or the user said no (status 5).
    """
    launcher = choose(plan, os.environ)
    request = LaunchRequest(plan, files, planned(run_root, plan.name), Path.cwd(), os.environ, wait)
    check(request, launcher)
    steps = _steps(request, launcher, source)
    if dry_run:
        for step in steps:
            echo(step.describe())
        if not launcher:
            echo(
                f"{_not_here(request.plan)} To launch it, type on a login node of it\n"
                f"  dslaunch launch DIR launcher=slurm\nwith the folder that `dslaunch render ... -o DIR` wrote."
            )
        return 0
    check_machine(request, launcher)
    _ask(plan, launcher, confirm)
    request = replace(request, run_dir=create(run_root, plan.name))
    echo(f"run folder: {request.run_dir}")
    status = execute(_steps(request, launcher, source), request.run_dir, launcher, echo)
    if not launcher:
        raise LaunchError(_next_command(request), status=5)
    return status


def launch_folder(
    folder: Path,
    run_root: Path,
    *,
    launcher: str = "",
    wait: bool,
    dry_run: bool,
    echo: Callable[[str], None],
    confirm: Callable[[str], bool] | None,
) -> int:
    """Launch exactly what `folder` holds, once its hashes prove that it is what was rendered.

    Args:
        launcher: who starts the ranks, where the plan's own choice does not suit this machine.

    Raises:
        ConfigError: a file differs, or is missing; and what `launch` raises.
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
    source = folder.absolute()
    return launch(
        plan, files, run_root, wait=wait, dry_run=dry_run, echo=echo, confirm=confirm, source=source
    )


def _steps(request: LaunchRequest, launcher: str, source: Path | None) -> list[Step]:
    script = request.plan.program.script
    code = request.absolute(script).parent if script else request.work_dir
    written: list[Step] = [
        WriteFiles(request.run_dir, request.files, source),
        RecordCode(request.run_dir, code),
    ]
    return written + (_PREPARE[launcher](request) if launcher else [])


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
