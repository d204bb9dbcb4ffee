"""What one optimizer step gives, and who hears of its phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Enter = Callable[[str], None]
"""Called with the name of each phase as it begins."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one rank."""

    loss: Tensor
    """Mean over this rank's samples; a scalar without gradient."""
    grad_norm: float
    """2-norm of the whole gradient before clipping, the same on every rank."""
    lr: float
    """The decoder's learning rate in this step (of the first group that trains)."""
    images: int
    """Of the global batch."""
