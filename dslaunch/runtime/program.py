"""The training program of one rank: the flow from plan.json to the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from dslaunch import progress
from dslaunch.planfile import Plan, Prediction
from dslaunch.runtime import checkpoints
from dslaunch.runtime.checks import check_executable, read_plan
from dslaunch.runtime.engines import Engine, make_engine
from dslaunch.runtime.metrics import Recorder, measure
from dslaunch.runtime.pace import Pace
from dslaunch.runtime.proof import prove, read_prediction
from dslaunch.runtime.reading import ReadAhead, read_ahead
from dslaunch.runtime.saving import Saved, Saver
from dslaunch.runtime.step import Enter
from dslaunch.runtime.stopping import Asked, Stopped, StopRequest
from dslaunch.runtime.world import World, join_world, part, read_world


def run(plan_path: Path, env: Mapping[str, str], enter: Enter) -> None:
    """Train what `plan_path` describes, on this rank.

    Raises:
        DslaunchError: a plan that the runtime does not execute, or a mistake in what it names.
        Stopped: SIGTERM asked for an end, and a checkpoint is saved.
    """
    progress.watch()
    enter("reading the plan")
    plan = read_plan(plan_path)
    check_executable(plan)
    world = read_world(env, plan)
    folder = Path(env.get("DSLAUNCH_RUN_DIR") or plan_path.parent)
    given = checkpoints.find(Path(plan.files.checkpoint_load)) if plan.files.checkpoint_load else None
    if given and not progress.resuming():
        checkpoints.check_readable(given, plan)  # before the ranks meet: none waits for one that has refused
    enter("opening the data")
    data = read_ahead(plan)
    enter("meeting the other ranks")
    join_world(world, plan)
    own = checkpoints.newest_intact(checkpoint_dir(plan, folder), world) if progress.resuming() else None
    if given and not own:
        enter(f"looking through {given}")
        checkpoints.check_intact(given, world)
    resumed = own or given
    start = checkpoints.check_readable(resumed, plan) if resumed else 0
    enter("building the model")
    engine = make_engine(plan, world, data, plan_path.parent, enter)
    kept: frozenset[str] = frozenset()
    if resumed:
        enter(f"loading {resumed}")
        kept = checkpoints.restore(engine, plan, world, resumed)
    try:
        train(engine, plan, world, data, folder, start, enter, read_prediction(plan_path), kept)
    except Stopped:
        part(world)
        raise
    finally:
        data.close()
    part(world)


def checkpoint_dir(plan: Plan, folder: Path) -> Path:
    """Where this run saves."""
    return Path(plan.files.checkpoint_dir or folder / "checkpoints")


def train(
    engine: Engine, plan: Plan, world: World, data: ReadAhead, folder: Path, start: int, enter: Enter,
    prediction: Prediction | None, kept: frozenset[str],
) -> None:  # fmt: skip
    """Steps `start` to the plan's last, with their metrics and checkpoints.

    Args:
        kept: parameters that were read from a checkpoint.

    Raises:
        NotDistributedError: the first step shows that ranks do not hold what the plan says, or the next ones that
            they are slower than it allows.
        SaveError: a checkpoint could not be written.
        Stopped: SIGTERM asked for an end, and a checkpoint is saved.
    """
    request = StopRequest()
    recorder = Recorder(folder, start, plan.training.steps) if world.rank == 0 else None
    told = recorder.saved if recorder else _nothing
    saver = Saver(engine, plan, world, checkpoint_dir(plan, folder), told, kept)
    if recorder and start >= plan.training.steps:
        print(f"the checkpoint is at step {start} of {plan.training.steps}: nothing to train", flush=True)
    pace = Pace(plan, prediction, world)
    for step in range(start, plan.training.steps):
        enter(f"training step {step + 1}")
        began, waited = time.perf_counter(), data.waited_s
        result = engine.step(step)
        took, waited = time.perf_counter() - began, data.waited_s - waited
        metrics = measure(step + 1, result, took, plan, world, waited)
        if recorder:
            recorder.write(metrics)
        if step == start:
            enter("proving that the first step was distributed")
            _say(recorder, prove(engine, plan, world, prediction))
        else:
            _say(recorder, pace.took(step + 1, metrics.step_time_s))
        progress.step(step + 1)
        saver.advance()
        asked = request.agreed(world)
        if asked or is_saved(step + 1, plan):
            enter(f"saving step {step + 1}")
            saver.save(step + 1)
        if asked is Asked.END and step + 1 < plan.training.steps:
            saver.finish()
            raise Stopped(f"SIGTERM: ended after step {step + 1} of {plan.training.steps}, which is saved")
    _say(recorder, pace.ended())
    saver.finish()
    if recorder:
        recorder.close()


def _nothing(_saved: Saved) -> None:
    """Rank 0 notes what is saved."""


def _say(recorder: Recorder | None, line: str) -> None:
    """Once for all ranks, where there is something to say."""
    if recorder and line:
        print(line, flush=True)


def is_saved(done: int, plan: Plan) -> bool:
    """Whether a checkpoint is written after `done` steps: at the end, and as often as the plan says."""
    every = plan.files.checkpoint_every
    return done == plan.training.steps or (every > 0 and done % every == 0)
