"""A folder of DeepSpeed checkpoints, read by the names in it: nothing of what was saved is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_\d{1,7}_)?mp_rank_\d{1,7}_model_states\.pt")
"""deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _get_rank_zero_ckpt_name, _get_ckpt_name 0.19.8."""
_LATEST, _TAG = "latest", re.compile(r"[^/\0]{1,255}")
_MAX_NAMES = 200_000
"""Of one saved step: two files a rank, of more ranks than any job has."""


@dataclass(frozen=True)
class Checkpoint:
    """The step that DeepSpeed would load from a folder."""

    tag: str
    """The name of the step's folder."""
    ranks: frozenset[tuple[int, int]]
    """(data-parallel rank, model-parallel rank) of each file of optimizer states; empty where none was saved."""
    universal: bool
    """Whether it was converted with ds_to_universal.py."""

    @property
    def data_parallel(self) -> int:
        """Replicas that wrote it; 0 where no ZeRO optimizer's states were saved."""
        return max((data for data, _ in self.ranks), default=-1) + 1

    @property
    def model_parallel(self) -> int:
        """tp * pp of the job that wrote it; 0 where no ZeRO optimizer's states were saved."""
        return max((model for _, model in self.ranks), default=-1) + 1


def find(folder: Path) -> tuple[str, str, Checkpoint] | None:
    """(name, text, checkpoint) of the folder, or None where it holds none.

    The folder is a step's own, or holds `latest` with the name of one. The name is that of what tells the step.
    """
    if saved := _step(folder):
        return str(folder), "", saved
    text = _latest(folder)
    saved = _step(folder / text.strip()) if _TAG.fullmatch(text.strip()) else None
    return (str(folder / _LATEST), text, saved) if saved else None


def _latest(folder: Path) -> str:
    path = folder / _LATEST
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        return stream.read(1000).decode(errors="replace")


def _step(folder: Path) -> Checkpoint | None:
    if not folder.is_dir():
        return None
    names = _names(folder)
    universal = "zero" in names and (folder / "zero").is_dir()
    if not universal and not any(_MODEL.fullmatch(name) for name in names):
        return None
    found = (_OPTIMIZER.fullmatch(name) for name in names)
    ranks = frozenset((int(match[1]), int(match[2])) for match in found if match)
    return Checkpoint(folder.name, ranks, universal)


def _names(folder: Path) -> Iterable[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in islice(entries, _MAX_NAMES)}
