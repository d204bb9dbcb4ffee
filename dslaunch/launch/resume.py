"""Start the files of a run once more, in its own folder: every rank is told to load the newest checkpoint."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.launch import PREPARE
from dslaunch.launch.before import before_launch
from dslaunch.launch.checks import check, check_machine
from dslaunch.launch.detach import check_detached, run_steps
from dslaunch.launch.elastic import adopt, executed, resumed
from dslaunch.launch.replan import layout_words
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Submit
from dslaunch.launch.universal import conversion_of
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.run.attempts import attempt_of, begin_attempt
from dslaunch.run.checkpoints import checkpoint_dir, newest_checkpoint
from dslaunch.run.find import word_for
from dslaunch.run.folder import verify
from dslaunch.run.generations import complete
from dslaunch.run.kube import job_of
from dslaunch.run.now import ENDED, KUBERNETES, OUTCOME, STOP, Now, look
from dslaunch.run.state import append_event, update_state

Echo = Callable[[str], None]


def resume(
    folder: Path, *, from_scratch: bool, wait: bool, dry_run: bool, detach: bool, skip_preflight: bool, echo: Echo,
    nodes: int = 0,
) -> int:  # fmt: skip
    """Start the run in `folder` again, from its newest checkpoint.

    Args:
        from_scratch: start at step 0 where there is no checkpoint.
        skip_preflight: start without asking the hosts how they are.
        nodes: plan an elastic run anew for at most so many nodes; 0: for as many as it was launched on.

    Returns:
        0 where the job succeeded, was submitted or runs detached; 1 where it failed.

    Raises:
        ConfigError: it runs, or has finished, or has no checkpoint, or its files have changed.
        LaunchError: as a launch.
        PlanError: an elastic run cannot be planned for what is left.
    """
    now = look(folder)
    _refuse(folder, now)
    complete(folder)
    files = verify(folder)
    plan = plan_from_json(files["plan.json"], str(folder / "plan.json"))
    started_from = _start(plan, folder, now, from_scratch)
    request = LaunchRequest(
        plan, files, folder, Path(now.state.work_dir), os.environ, wait, attempt=attempt_of(folder) + 1,
        preflight=not skip_preflight,
    )  # fmt: skip
    launcher, start = now.state.launcher, None
    if plan.supervision.elastic_min_nodes:
        start, request = resumed(request, launcher, nodes)
    elif nodes:
        raise ConfigError(f"--nodes {nodes}: {folder.name} is not elastic. Launch anew with restart.elastic=true")
    check(request, launcher)
    steps = [executed(request, start.words)] if start and start.words else PREPARE[launcher](request)
    check_detached(detach, steps)
    if dry_run:
        if start and start.replanned:
            echo(f"plan anew: {layout_words(start.plan)}; before: {layout_words(plan)}; {start.why}")
        if wanted := conversion_of(request.plan, folder, now.state.work_dir):
            echo(wanted.describe())
        for step in steps:
            echo(step.describe())
        return 0
    check_machine(request, launcher)
    before_launch(request, launcher, echo, skip=skip_preflight)
    echo(f"{folder.name}: attempt {request.attempt}, from {started_from}")
    if start and (said := adopt(folder, plan, start)):
        echo(said)
    if any(isinstance(step, Submit) for step in steps):
        _reset_job(folder, started_from)
    else:
        begin_attempt(folder, f"resume from {started_from}")
        update_state(folder, status="prepared", exit_status=None, process=None, supervisor=None)
    return run_steps(steps, folder, launcher, echo, detach=detach)


def _refuse(folder: Path, now: Now) -> None:
    name, word, path = folder.name, word_for(folder), shlex.quote(str(folder))
    if now.standing == "finished":
        raise ConfigError(
            f"{name}: has finished; nothing is left to resume. To train anew, in a folder of its own: "
            f"dslaunch launch {path}"
        )
    if now.standing == "unsupervised":
        raise ConfigError(f"{name}: {now.why}. End it first: dslaunch stop {word}")
    if now.standing in ("queued", "running", "unknown"):
        why = f" ({now.why})" if now.why else ""
        raise ConfigError(f"{name}: is {now.standing}{why}. To end it first: dslaunch stop {word}")
    if not now.state.launcher or not now.state.work_dir:
        raise ConfigError(f"{name}: was never launched from here. To launch its files: dslaunch launch {path}")
    assert now.standing in (*ENDED, "prepared")


def _start(plan: Plan, folder: Path, now: Now, from_scratch: bool) -> str:
    """What it starts from, in words."""
    if now.state.launcher == KUBERNETES:
        return _start_on_volume(folder, from_scratch)
    place = checkpoint_dir(plan, folder, now.state.work_dir)
    saved = newest_checkpoint(place)
    if saved and from_scratch:
        raise ConfigError(
            f"--from-scratch: {place} holds {saved.path.name}, which would be loaded. To train anew, in a "
            f"folder of its own: dslaunch launch {shlex.quote(str(folder))}"
        )
    if saved:
        return f"{saved.path.name} in {place}"
    if not from_scratch:
        raise ConfigError(
            f"{folder.name}: no checkpoint in {place}: it ended before the first was saved (checkpoint.every is "
            f"{plan.files.checkpoint_every}). To start at step 0: "
            f"dslaunch resume {word_for(folder)} --from-scratch"
        )
    return "step 0"


def _start_on_volume(folder: Path, from_scratch: bool) -> str:
    """Checkpoints stand on the pods' volume, which is not seen from here."""
    if not job_of(folder).keeps and not from_scratch:
        raise ConfigError(
            f"{folder.name}: its checkpoints went with its pods, for launcher.kubernetes.volume_claim named no "
            f"volume. To start at step 0: dslaunch resume {word_for(folder)} --from-scratch"
        )
    return "step 0" if from_scratch else "the newest checkpoint on its volume"


def _reset_job(folder: Path, started_from: str) -> None:
    """Forget the jobs that ended. job.sbatch begins the attempt when SLURM starts it."""
    (folder / OUTCOME).unlink(missing_ok=True)
    (folder / STOP).unlink(missing_ok=True)
    update_state(folder, status="prepared", exit_status=None, slurm_job="", continuations=())
    append_event(folder, "resume", start=started_from)
