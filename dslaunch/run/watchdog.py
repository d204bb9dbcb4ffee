"""A run hangs when its ranks' steps stand still, whatever its logs say."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dslaunch.planfile import SupervisionPlan
from dslaunch.run.records import read_ranks

_LOOK_AT_LEAST_EVERY_S = 30.0
_LOOKS_PER_LIMIT = 20


@dataclass(frozen=True)
class Standstill:
    """No rank completed a step for too long."""

    seconds: float
    limit_s: float
    steps: dict[int, int]
    """Last completed step by rank; empty before the first."""

    @property
    def key(self) -> str:
        """Of the limit."""
        return "watchdog.minutes" if self.steps else "watchdog.start_minutes"


class Watchdog:
    """Watches one attempt; asked often, it looks at the files now and then."""

    def __init__(self, ranks: Path, plan: SupervisionPlan) -> None:
        """`ranks` is the folder of the ranks' records."""
        self._ranks = ranks
        self._limit_s = plan.watchdog_minutes * 60
        self._start_limit_s = plan.watchdog_start_minutes * 60
        self._steps: dict[int, int] = {}
        limits = [limit for limit in (self._limit_s, self._start_limit_s) if limit]
        self._every_s = min([_LOOK_AT_LEAST_EVERY_S, *(limit / _LOOKS_PER_LIMIT for limit in limits)])
        self._looked = time.monotonic()
        self._stood = 0.0

    def look(self) -> Standstill | None:
        """A standstill that is longer than its limit."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < self._every_s:
            return None
        self._looked = now
        # Where nobody looked, the whole machine was suspended or starved: the ranks had no time to move either.
        self._stood += min(passed, 2 * self._every_s)
        steps = {each.rank: each.step for each in read_ranks(self._ranks) if each.step is not None}
        if steps != self._steps:
            self._steps, self._stood = steps, 0.0
        limit = self._limit_s if steps else self._start_limit_s
        if not limit or self._stood < limit:
            return None
        return Standstill(self._stood, limit, steps)
