"""Checkpoints: one folder per step, and `latest`, which names the last complete one.

    DIR/step-00000020/              the strategy's own files (DeepSpeed's, or torch's distributed format);
                                    under the engine native DeepSpeed's, in a folder for each component
    DIR/step-00000020/files.json    sizes and checksums of the files
    DIR/step-00000020/dslaunch.json the step, and which layouts can read it
    DIR/latest                      step-00000020; written last, in one move
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.runtime.engines import Engine
from dslaunch.runtime.intact import LIST, is_intact, list_files
from dslaunch.runtime.world import World

CHECKPOINT_SCHEMA = "dslaunch.checkpoint/1"
_NOTE = "dslaunch.json"


@dataclass(frozen=True)
class Note:
    """What a checkpoint is. The position in the data and every random draw follow from the step."""

    step: int
    sharding: str
    zero: int
    world_size: int
    model: str
    layouts: dict[str, str] = field(default_factory=dict)
    """By component, where each has files of its own."""
    schema: str = CHECKPOINT_SCHEMA


def note_of(plan: Plan, step: int) -> Note:
    first = next(iter(plan.components.values()))
    own = plan.components if plan.engine.name == "native" else {}
    layouts = {name: _where(layout) for name, layout in own.items()}
    return Note(step, plan.engine.sharding, first.zero, plan.world_size, plan.model["name"], layouts)


def _where(layout: ComponentPlan) -> str:
    """What a component's files are cut by."""
    stages = "+".join(map(str, layout.layers_per_stage))
    return f"tp {layout.tp}, dp {layout.dp}, layers by stage {stages}, ZeRO-{layout.zero}"


def save(engine: Engine, plan: Plan, world: World, step: int, root: Path) -> Path:
    """Write the state after `step` steps under `root`; every rank calls it."""
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(folder)
    dist.barrier()
    files = list_files(folder, world)
    if world.rank == 0:
        _replace(folder / LIST, files)
        _replace(folder / _NOTE, json.dumps(asdict(note_of(plan, step)), sort_keys=True) + "\n")
        _replace(root / "latest", folder.name + "\n")
    return folder


def find(path: Path) -> Path:
    """The folder of one step: `path` itself, or what `latest` in it names.

    Raises:
        ConfigError: there is no checkpoint.
    """
    latest = path / "latest"
    folder = path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path
    if not (folder / _NOTE).is_file():
        raise ConfigError(
            f"checkpoint.load: no checkpoint in {path}: neither a file `latest` nor {_NOTE}. Name the folder "
            "`checkpoints` of a run, or one of the step folders in it."
        )
    return folder


def newest_intact(root: Path, world: World) -> Path | None:
    """The newest whole checkpoint under `root`, for a run that goes on; every rank calls it.

    None where there is none. One that is broken is named and passed over.
    """
    found: list[list[Path]] = [sorted(path.parent for path in root.glob(f"step-*/{_NOTE}"))]
    dist.broadcast_object_list(found)
    for folder in reversed(found[0]):
        if is_intact(folder, world):
            return folder
        if world.rank == 0:
            print(f"{folder} is broken and passed over: a file is missing, or not as it was written", flush=True)
    return None


def check_readable(folder: Path, plan: Plan) -> int:
    """The step of the checkpoint in `folder`.

    Raises:
        ConfigError: another model or strategy wrote it, or another version of dslaunch.
    """
    try:
        saved = Note(**json.loads((folder / _NOTE).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder / _NOTE}: not a note of {CHECKPOINT_SCHEMA}: {error}.") from error
    wanted = asdict(note_of(plan, saved.step))
    for key, found in asdict(saved).items():
        # torch's distributed format is laid out anew for another number of ranks, DeepSpeed's is not.
        if found != wanted[key] and (key != "world_size" or saved.sharding == "zero"):
            raise ConfigError(
                f"checkpoint.load: {folder} has {key} = {found!r}, this plan {wanted[key]!r}. Continue with "
                "the settings that wrote it, or start without checkpoint.load."
            )
    return saved.step


def _replace(path: Path, text: str) -> None:
    """Write `path` so that a reader sees the old text or the new one, also after a crash."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
