"""SIGTERM asks for a checkpoint and an end: before a time limit, at a preemption, or at `dslaunch stop`.

The supervisor may ask for a checkpoint alone (dslaunch.progress.save_asked). Ranks hear of it at different
moments, so that they agree, once a step, on what one of them has heard.
"""

from __future__ import annotations

import enum
import signal

import torch
import torch.distributed as dist

from dslaunch import progress
from dslaunch.runtime.world import World

STATUS = 128 + signal.SIGTERM
"""Exit status of a run that saved and ended because it was asked to: as a shell reports SIGTERM."""


class Asked(enum.IntEnum):
    """What is to follow the step at hand; the greater one includes the other."""

    NOTHING = 0
    SAVE = 1
    END = 2


class Stopped(Exception):  # noqa: N818  # no error: the run did what it was asked
    """Training ended before its last step, after a checkpoint."""


class StopRequest:
    """What this rank was asked. A signal is noted, and never cuts a step short."""

    def __init__(self) -> None:
        self._asked = Asked.NOTHING
        signal.signal(signal.SIGTERM, lambda *_: self._note())

    def _note(self) -> None:
        self._asked = Asked.END

    def agreed(self, world: World) -> Asked:
        """What any rank was asked; every rank calls it, and all get the same answer."""
        saves = world.rank == 0 and progress.save_asked()
        asked = torch.tensor(float(max(self._asked, Asked(saves))), device=world.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return Asked(int(asked))
