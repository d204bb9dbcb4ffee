"""Writing checkpoints, while training waits or while it goes on.

Every rank writes its share; when all have, rank 0 notes that the checkpoint is whole. Until then the folder has no
note, and nobody goes on from it. In the background a thread of each rank writes a copy of the state in the host's
memory; between steps the ranks ask one another how far they are, so that the thread itself needs no other rank.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dslaunch.planfile import Plan, to_json
from dslaunch.runtime.checkpoints import NOTE, PLAN, note_of, replace
from dslaunch.runtime.engines import Engine
from dslaunch.runtime.intact import LIST, Sum, list_of, sums
from dslaunch.runtime.store import Share, share
from dslaunch.runtime.world import World


class SaveError(Exception):
    """A checkpoint that ranks could not write; the same on every rank."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    step: int
    folder: Path
    waited_s: float
    """For which training stood still."""
    took_s: float
    """From its begin on."""


class _Writing:
    """One rank's part of a checkpoint that is under way."""

    def __init__(self, step: int, folder: Path, began: float, mine: Share, plan: str) -> None:
        self.step, self.folder, self.began = step, folder, began
        self.waited_s = time.perf_counter() - began
        self.sums: dict[str, Sum] = {}
        self.fault = ""
        self.thread = threading.Thread(target=self._run, args=(mine, plan), daemon=True)
        self.thread.start()

    def _run(self, mine: Share, plan: str) -> None:
        try:
            names = mine.write(self.folder)
            if plan:
                (self.folder / PLAN).write_text(plan, encoding="utf-8")
                names.append(PLAN)
            self.sums = sums(self.folder, names)
        except Exception as error:  # whatever it is, the training thread tells it
            self.fault = f"{type(error).__name__}: {error}"


class Saver:
    """Saves one checkpoint at a time under `root`; every rank has one, and all call its methods alike."""

    def __init__(
        self, engine: Engine, plan: Plan, world: World, root: Path, told: Callable[[Saved], None],
        kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            told: called on each rank when a checkpoint is whole.
            kept: parameters that were read from a checkpoint, and are written again where they are frozen now.
        """
        self.engine, self.plan, self.world, self.root, self.told = engine, plan, world, root, told
        self.kept = kept
        self._writing: _Writing | None = None

    def save(self, step: int) -> None:
        """Write the state after `step` steps, or begin to; one that is under way is ended first.

        Raises:
            SaveError: ranks could not write it, or the one before.
        """
        self.finish()
        began = time.perf_counter()
        folder = self.root / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.world.rank == 0:
            _clear(folder)
        dist.barrier()
        later = self.plan.files.checkpoint_async
        mine = share(self.engine, self.world, copied=later, kept=self.kept)
        plan = to_json(self.plan) if self.world.rank == 0 else ""
        self._writing = _Writing(step, folder, began, mine, plan)
        if not later:
            self.finish()

    def advance(self) -> None:
        """Note that a checkpoint is whole as soon as all ranks have written their shares; called between steps.

        Raises:
            SaveError: ranks could not write it.
        """
        if (writing := self._writing) is not None:
            began = time.perf_counter()
            mine = [float(writing.thread.is_alive()), float(bool(writing.fault))]
            states = torch.tensor(mine, device=self.world.device)
            dist.all_reduce(states)
            busy, failed = states.tolist()
            if failed or not busy:
                self._complete(writing, began)

    def finish(self) -> None:
        """Wait for a checkpoint that is under way.

        Raises:
            SaveError: ranks could not write it.
        """
        if (writing := self._writing) is not None:
            began = time.perf_counter()
            writing.thread.join()
            self._complete(writing, began)

    def _complete(self, writing: _Writing, began: float) -> None:
        """Make a whole checkpoint of what all ranks have written, or end where one of them could not.

        Args:
            began: when training began to wait for this.
        """
        self._writing = None
        shares: list[Any] = [None] * self.world.size
        dist.all_gather_object(shares, (writing.sums, writing.fault))
        _check([fault for _, fault in shares], writing)
        if self.world.rank == 0:
            replace(writing.folder / LIST, list_of(own for own, _ in shares))
            note = note_of(self.plan, writing.step)
            replace(writing.folder / NOTE, json.dumps(asdict(note), sort_keys=True) + "\n")
            replace(self.root / "latest", writing.folder.name + "\n")
            _retire(self.root, writing.folder, self.plan.files.checkpoint_keep)
        now = time.perf_counter()
        self.told(Saved(writing.step, writing.folder, writing.waited_s + now - began, now - writing.began))


def _check(faults: list[str], writing: _Writing) -> None:
    """Raises SaveError where a rank could not write its share."""
    told = [f"  rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    if told:
        said = f"the checkpoint of step {writing.step} could not be written into {writing.folder}"
        raise SaveError("\n".join([said, *told]))


def _clear(folder: Path) -> None:
    """Take away what an attempt that was cut off left; its note first, so that nobody reads half of it."""
    (folder / NOTE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()


def _retire(root: Path, newest: Path, keep: int) -> None:
    """Take away whole checkpoints before the last `keep` (0: none); their notes first."""
    whole = sorted(path.parent for path in root.glob(f"step-*/{NOTE}") if path.parent.name <= newest.name)
    for folder in whole[:-keep] if keep else []:
        (folder / NOTE).unlink()
        shutil.rmtree(folder)
