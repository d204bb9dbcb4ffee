"""Checkpoints: one folder per step, and `latest`, which names the last complete one.

    DIR/step-00000020/              the state, in pieces that any layout can read (store.py)
    DIR/step-00000020/plan.json     the plan that wrote it
    DIR/step-00000020/files.json    sizes and checksums of the files
    DIR/step-00000020/dslaunch.json the step, and the layouts that wrote it
    DIR/latest                      step-00000020; written last, in one move
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.runtime import store
from dslaunch.runtime.engines import Engine
from dslaunch.runtime.graph import given_weights, unset_model
from dslaunch.runtime.intact import LIST, is_intact
from dslaunch.runtime.world import World

CHECKPOINT_SCHEMA = "dslaunch.checkpoint/2"
NOTE = "dslaunch.json"
PLAN = "plan.json"


@dataclass(frozen=True)
class Note:
    """What a checkpoint is. The position in the data and every random draw follow from the step."""

    step: int
    model: str
    layout: str
    """What wrote it, in words."""
    start: str
    """What frozen weights follow from, which are left out."""
    schema: str = CHECKPOINT_SCHEMA


def note_of(plan: Plan, step: int) -> Note:
    weights = ", ".join(f"weights {name}={folder}" for name, folder in sorted(given_weights(plan).items()))
    start = ", ".join(filter(None, [f"training.seed={plan.training.seed}", weights]))
    return Note(step, plan.model["name"], _layout(plan), start)


def _layout(plan: Plan) -> str:
    """Such as `native on 8 ranks: llm tp 2, dp 2, stages of 2+2 layers, ZeRO-1; ...`"""
    first, *_ = plan.components.values()
    if plan.engine.name != "native":
        kind = f"ZeRO-{first.zero}" if plan.engine.sharding == "zero" else plan.engine.sharding
        return f"{kind} on {plan.world_size} ranks"
    parts = [f"{name} {_where(layout)}" for name, layout in plan.components.items()]
    return f"native on {plan.world_size} ranks: {'; '.join(parts)}"


def _where(layout: ComponentPlan) -> str:
    stages = "+".join(map(str, layout.layers_per_stage))
    cut = f", stages of {stages} layers" if layout.pp > 1 else ""
    return f"tp {layout.tp}, dp {layout.dp}{cut}, ZeRO-{layout.zero}"


def restore(engine: Engine, plan: Plan, world: World, folder: Path) -> frozenset[str]:
    """Go on from the checkpoint in `folder`, which `check_readable` let pass; every rank calls it.

    Returns:
        The parameters that it holds: they do not follow from the plan any more, whether they train or not.
    """
    saved = read_note(folder)
    wanted = _layout(plan)
    if world.rank == 0 and saved.layout != wanted:
        print(f"{folder} was written as {saved.layout}; it goes on as {wanted}", flush=True)
    source = store.Source(folder)
    store.restore(engine, source, saved.step)
    return frozenset(source.tensors)


def find(path: Path) -> Path:
    """The folder of one step: `path` itself, or what `latest` in it names.

    Raises:
        ConfigError: there is no checkpoint.
    """
    latest = path / "latest"
    folder = path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path
    if not (folder / NOTE).is_file():
        raise ConfigError(
            f"checkpoint.load: no checkpoint in {path}: neither a file `latest` nor {NOTE}. Name the folder "
            "`checkpoints` of a run, or one of the step folders in it."
        )
    return folder


def newest_intact(root: Path, world: World) -> Path | None:
    """The newest whole checkpoint under `root`, for a run that goes on; every rank calls it.

    None where there is none. One that is broken is named and passed over.
    """
    found: list[list[Path]] = [sorted(path.parent for path in root.glob(f"step-*/{NOTE}"))]
    dist.broadcast_object_list(found)
    for folder in reversed(found[0]):
        if is_intact(folder, world):
            return folder
        if world.rank == 0:
            print(f"{folder} is broken and passed over: a file is missing, or not as it was written", flush=True)
    return None


def check_intact(folder: Path, world: World) -> None:
    """Every rank calls it.

    Raises:
        ConfigError: a file is missing, or not as it was written; on every rank alike.
    """
    if not is_intact(folder, world):
        raise ConfigError(
            f"checkpoint.load: {folder} is broken: a file that its {LIST} names is missing, or not as it was "
            "written. Name another checkpoint, such as an earlier step of the run."
        )


def check_readable(folder: Path, plan: Plan) -> int:
    """The step of the checkpoint in `folder`, which the model of `plan` can go on from under any layout.

    Raises:
        ConfigError: another model wrote it, or another version of dslaunch.
    """
    saved = read_note(folder)
    with torch.device("meta"):
        model = unset_model(plan)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    store.check_fits(store.Source(folder), shapes, (saved.start, note_of(plan, saved.step).start))
    return saved.step


def read_note(folder: Path) -> Note:
    """Raises ConfigError where there is none, or one of another version."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        if note["schema"] == CHECKPOINT_SCHEMA:
            return Note(**note)
        found = note["schema"]
    except (OSError, TypeError, ValueError, KeyError) as error:
        found = repr(error)
    raise ConfigError(
        f"{folder / NOTE}: not a note of {CHECKPOINT_SCHEMA}: {found}. Go on with the version of dslaunch that "
        "wrote it, or start without checkpoint.load."
    )


def replace(path: Path, text: str) -> None:
    """Write `path` so that a reader sees the old text or the new one, also after a crash."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
