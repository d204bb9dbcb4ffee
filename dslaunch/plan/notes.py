"""What a search passes over, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dslaunch.plan.options import Misfit


@dataclass
class Notes:
    """What a search passes over, and why."""

    considered: int = 0
    """Layouts that were looked at, or that a bound stands for."""
    misfits: list[tuple[str, Misfit]] = field(default_factory=list)
    """(engine and components, what does not fit)."""
    passed: set[str] = field(default_factory=set)
    """Engines of which some layout fits, or is too slow to be weighed."""
    illegal: dict[str, list[str]] = field(default_factory=dict)
    """By engine: what stands against the first layout that it refuses."""

    def refuse(self, engine: str, faults: Sequence[str], layouts: int = 1) -> None:
        self.considered += layouts
        self.illegal.setdefault(engine, list(faults))
