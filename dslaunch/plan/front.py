"""What a search keeps of all that fits: the front of memory against time, and the best by the goal."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from dslaunch.engines.layout import Layout

KEPT = 6
"""Candidates that are shown, the winner among them: the best of each way to cut the trunk."""
SLOWER = 1.25
"""How far the front goes: as much slower, or larger where memory is the goal, than the best."""


@dataclass(frozen=True)
class Scored:
    """A layout of the whole model that fits."""

    engine: str
    schedule: str
    trunk: str
    layouts: Mapping[str, Layout]
    peak_gib: float
    step_s: float
    sharding: str
    shard: int | None
    """Ranks that share one copy of the states under hsdp."""

    @property
    def point(self) -> tuple[float, float]:
        return self.peak_gib, self.step_s

    @property
    def who(self) -> str:
        """The engine, and who shards where it is not the engine: `torch hsdp over 8`."""
        return named(self.engine, self.sharding, self.shard)

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells it from others that are shown: the engine, and how the trunk is cut."""
        layout = self.layouts[self.trunk]
        return self.engine, self.sharding, layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.dp


def named(engine: str, sharding: str, shard: int | None) -> str:
    """Such as `megatron`, `torch fsdp2`, `torch hsdp over 8`."""
    who = engine if sharding == "zero" else f"{engine} {sharding}"
    return f"{who} over {shard}" if shard else who


@dataclass
class Front:
    """Grows as candidates are added; the order of equal ones is that in which they came."""

    by_memory: bool = False
    """Whether the best takes least memory, not least time."""
    best: list[Scored] = field(default_factory=list)
    """The KEPT best of different kinds, in order."""
    skyline: list[Scored] = field(default_factory=list)
    """Those that none beats in memory and time, ascending in memory, and so falling in time."""

    def wants(self, at_least_gib: float, at_least_s: float) -> bool:
        """Whether a candidate of this memory and time, or more, can change anything."""
        key = self._key(at_least_gib, at_least_s)
        if len(self.best) < KEPT or key < self._key(*self.best[-1].point):
            return True
        return key[0] <= SLOWER * self._key(*self.best[0].point)[0] and not self._beaten(
            at_least_gib, at_least_s
        )

    def may_win(self, at_least_s: float) -> bool:
        """Whether a candidate of this time or more can be the best."""
        return self.by_memory or not self.best or at_least_s < self.best[0].step_s

    def add(self, found: Scored) -> None:
        """Keep the candidate where it belongs."""
        same = next((each for each in self.best if each.kind == found.kind), None)
        if same is None or self._key(*found.point) < self._key(*same.point):
            self.best = [each for each in self.best if each is not same]
            keys = [self._key(*each.point) for each in self.best]
            self.best.insert(bisect.bisect_right(keys, self._key(*found.point)), found)
            del self.best[KEPT:]
        if self._beaten(*found.point):
            return
        self.skyline = [each for each in self.skyline if not _beats(found, each)]
        at = bisect.bisect_left([each.peak_gib for each in self.skyline], found.peak_gib)
        self.skyline.insert(at, found)

    def near(self) -> list[Scored]:
        """The skyline as far as it goes, without points that are all but the same as the one before."""
        worst, shown = SLOWER * self._key(*self.best[0].point)[0], list[Scored]()
        for each in self.skyline:
            if self._key(*each.point)[0] <= worst and not (shown and _alike(shown[-1], each)):
                shown.append(each)
        return shown

    def _beaten(self, peak_gib: float, step_s: float) -> bool:
        """Whether one of the skyline takes no more of both."""
        at = bisect.bisect_right(self.skyline, peak_gib, key=lambda each: each.peak_gib)
        return at > 0 and self.skyline[at - 1].step_s <= step_s

    def _key(self, peak_gib: float, step_s: float) -> tuple[float, float]:
        return (peak_gib, step_s) if self.by_memory else (step_s, peak_gib)


def _beats(one: Scored, other: Scored) -> bool:
    return one.peak_gib <= other.peak_gib and one.step_s <= other.step_s


def _alike(one: Scored, other: Scored) -> bool:
    """Within one per cent of each other's time."""
    return abs(one.step_s - other.step_s) < 0.01 * one.step_s
