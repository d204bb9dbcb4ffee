"""The newest checkpoint of a run, in the forms that the frameworks write.

    dslaunch.runtime      latest names step-NNNNNNNN            (dslaunch/runtime/checkpoints.py)
    DeepSpeed             latest names a folder, by default global_stepN
                          (deepspeed/runtime/engine.py 0.19.8: save_checkpoint)
    Megatron              latest_checkpointed_iteration.txt holds N, the folder is iter_NNNNNNN
                          (megatron/training/checkpointing.py, core 0.16)
    Hugging Face Trainer  checkpoint-N
                          (transformers/trainer_utils.py 5: PREFIX_CHECKPOINT_DIR)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dslaunch.planfile import Plan

_NUMBER = re.compile(r"(\d+)\D*$")
_NAMED_BY_STEP = re.compile(r"(checkpoint|step|global_step|iter)[-_]?\d+")


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that a resumed program would load."""

    path: Path
    step: int | None
    """As its name tells."""
    written_at: float
    """Unix time."""


def checkpoint_dir(plan: Plan, folder: Path, work_dir: str) -> Path:
    """Where the run keeps its checkpoints: as the user gave it there, or in the run folder."""
    given = plan.files.checkpoint_dir
    return Path(work_dir, given) if given else folder / "checkpoints"


def newest_checkpoint(folder: Path) -> SavedState | None:
    """The newest checkpoint in `folder`; None where there is none in a form that is known here."""
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        if (folder / name).is_file():
            return _named(folder, (folder / name).read_text(encoding="utf-8", errors="replace").strip())
    found = [path for path in folder.glob("*") if path.is_dir() and _NAMED_BY_STEP.fullmatch(path.name)]
    newest = max(found, key=lambda path: _step(path.name) or 0, default=None)
    return _saved(newest) if newest else None


def saved_before(folder: Path, step: int) -> SavedState | None:
    """The newest checkpoint in `folder` from which `step` is still to be done; None where there is none."""
    saved = [_saved(path) for path in folder.glob("*") if path.is_dir() and _NAMED_BY_STEP.fullmatch(path.name)]
    before = [each for each in saved if each.step is not None and each.step < step]
    return max(before, key=lambda each: each.step or 0, default=None)


def _named(folder: Path, tag: str) -> SavedState | None:
    path = folder / (f"iter_{int(tag):07d}" if tag.isdigit() else tag)
    return _saved(path) if tag and path.exists() else None


def _saved(path: Path) -> SavedState:
    return SavedState(path, _step(path.name), path.stat().st_mtime)


def _step(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[1]) if found else None
