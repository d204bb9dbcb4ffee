"""SIGTERM asks for a checkpoint and an end: before a time limit, at a preemption, or at `dslaunch stop`.

Ranks get it at different moments, so that they agree, once a step, on whether one of them has.
"""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

from dslaunch.runtime.world import World

STATUS = 128 + signal.SIGTERM
"""Exit status of a run that saved and ended because it was asked to: as a shell reports SIGTERM."""


class Stopped(Exception):  # noqa: N818  # no error: the run did what it was asked
    """Training ended before its last step, after a checkpoint."""


class StopRequest:
    """Whether a signal asked this rank to end. It is noted, and never cuts a step short."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, lambda *_: self._note())

    def _note(self) -> None:
        self._asked = True

    def agreed(self, world: World) -> bool:
        """Whether any rank was asked; every rank calls it, and all get the same answer."""
        asked = torch.tensor(float(self._asked), device=world.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)
