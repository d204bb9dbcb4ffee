"""A folder of Megatron's checkpoints, read by the names in it: nothing of what was saved is opened.

NVIDIA/Megatron-LM:megatron/training/checkpointing.py get_checkpoint_name, read_metadata, core_v0.16.1.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
STEP = re.compile(r"iter_\d{7,9}|release")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
_MAX_NAMES = 200_000
"""Of one step: a folder for each rank of a model, of more than any job has."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """What the folder of --load holds."""

    tracked: str
    """The step's folder that the tracker file names; empty where there is no such file."""
    steps: frozenset[str]
    """Folders of steps that are there."""
    ranks: frozenset[tuple[int, int]]
    """(tensor, pipeline) rank of each folder of the tracked step in the format `torch`; empty in other formats."""

    @property
    def tensor_parallel(self) -> int:
        """tp of the job that wrote it; 0 where the format doesn't tell."""
        return max((tensor for tensor, _ in self.ranks), default=-1) + 1

    @property
    def pipeline_parallel(self) -> int:
        """pp of the job that wrote it; 0 where the format doesn't tell."""
        return max((stage for _, stage in self.ranks), default=-1) + 1


def find(folder: Path) -> tuple[str, str, MegatronCheckpoint] | None:
    """(name, text, checkpoint) of the folder, or None where it holds none; the name is the tracker file's."""
    tracker = folder / TRACKER
    text = ""
    if tracker.is_file():
        with tracker.open("rb") as stream:
            text = stream.read(100).decode(errors="replace")
    named = (name for name in _names(folder) if STEP.fullmatch(name) and (folder / name).is_dir())
    steps = frozenset(name for name in named if text or name != "release" or _is_saved(folder / name))
    if not text and not steps:
        return None
    word = text.strip()
    tracked = f"iter_{int(word):07d}" if word.isascii() and word.isdigit() and len(word) < 10 else word
    ranks = _ranks(folder / tracked) if tracked in steps else frozenset()
    return str(tracker if text else folder), text, MegatronCheckpoint(tracked, steps, ranks)


def _is_saved(step: Path) -> bool:
    """Whether a folder that many projects have by this name holds a checkpoint."""
    return any(_RANK.match(name) or name == "metadata.json" or name.endswith(".distcp") for name in _names(step))


def _ranks(step: Path) -> frozenset[tuple[int, int]]:
    found = (_RANK.fullmatch(name) for name in _names(step))
    return frozenset((int(match[1]), int(match[2] or 0)) for match in found if match)


def _names(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in islice(entries, _MAX_NAMES)}
