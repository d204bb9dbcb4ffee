"""The training program of one rank: the flow from plan.json to the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan, plan_from_json
from dslaunch.runtime import checkpoints
from dslaunch.runtime.checks import check_executable
from dslaunch.runtime.data import Digits, micro_batches, open_data
from dslaunch.runtime.engines import Engine, make_engine
from dslaunch.runtime.graph import build_model
from dslaunch.runtime.metrics import Recorder, measure
from dslaunch.runtime.world import World, join_world, read_world

Enter = Callable[[str], None]
"""Called with the name of each phase as it begins."""


def run(plan_path: Path, env: Mapping[str, str], enter: Enter) -> None:
    """Train what `plan_path` describes, on this rank.

    Raises:
        DslaunchError: a plan that the runtime does not execute, or a mistake in what it names.
    """
    enter("reading the plan")
    plan = read_plan(plan_path)
    check_executable(plan)
    world = read_world(env, plan)
    folder = Path(env.get("DSLAUNCH_RUN_DIR") or plan_path.parent)
    resumed = checkpoints.find(Path(plan.files.checkpoint_load)) if plan.files.checkpoint_load else None
    start = checkpoints.check_readable(resumed, plan) if resumed else 0
    enter("opening the data")
    data = open_data(plan)
    enter("building the model")
    model = build_model(plan)
    enter("meeting the other ranks")
    join_world(world, plan)
    enter("preparing the strategy")
    engine = make_engine(model, plan, world, plan_path.parent)
    if resumed:
        enter(f"loading {resumed}")
        engine.load(resumed)
    train(engine, data, plan, world, folder, start, enter)
    dist.destroy_process_group()


def train(
    engine: Engine, data: Digits, plan: Plan, world: World, folder: Path, start: int, enter: Enter
) -> None:
    """Steps `start` to the plan's last, with their metrics and checkpoints."""
    recorder = Recorder(folder, start, plan.training.steps) if world.rank == 0 else None
    checkpoint_dir = Path(plan.files.checkpoint_dir or folder / "checkpoints")
    if recorder and start >= plan.training.steps:
        print(f"the checkpoint is at step {start} of {plan.training.steps}: nothing to train", flush=True)
    for step in range(start, plan.training.steps):
        enter(f"training step {step + 1}")
        began = time.perf_counter()
        result = engine.step(micro_batches(data, step, world.rank, plan))
        metrics = measure(step + 1, result, time.perf_counter() - began, plan, world)
        if recorder:
            recorder.write(metrics)
        if is_saved(step + 1, plan):
            enter(f"saving step {step + 1}")
            saved = checkpoints.save(engine, plan, world, step + 1, checkpoint_dir)
            if recorder:
                print(f"saved {saved}", flush=True)
    if recorder:
        recorder.close()


def is_saved(done: int, plan: Plan) -> bool:
    """Whether a checkpoint is written after `done` steps: at the end, and as often as the plan says."""
    every = plan.files.checkpoint_every
    return done == plan.training.steps or (every > 0 and done % every == 0)


def read_plan(path: Path) -> Plan:
    """The plan in `path`; raises ConfigError where it is missing or not a plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Give the plan.json that `dslaunch render` wrote."
        ) from error
    return plan_from_json(text, str(path))
