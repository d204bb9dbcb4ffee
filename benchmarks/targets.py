"""What is to be reached, and what is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.bands import ALLOCATOR
from benchmarks.crossval import Held, all_errors
from benchmarks.errors import Error
from benchmarks.regret import sweeps
from benchmarks.statistics import over_sources, summary

_CALIBRATED_GPUS = ("A100", "A100-80GB", "A100-40GB", "H100-80GB", "H100-96GB")


@dataclass(frozen=True)
class Target:
    """One row of the table: shares, smaller is better unless `at_least`."""

    name: str
    wanted: float
    reached: float | None
    at_least: bool = False

    @property
    def shown(self) -> str:
        """What is reached, in words."""
        return "-" if self.reached is None else f"{self.reached:.1%}"

    @property
    def met(self) -> bool:
        if self.reached is None:
            return False
        return self.reached >= self.wanted if self.at_least else self.reached <= self.wanted


def targets(held: Sequence[Held]) -> list[Target]:
    """Every target with what cross-validation reaches."""
    found, best = all_errors(held), graded(held)
    memory = [e for e in best if e.kind == "memory" and e.quantity in ALLOCATOR]
    peak, simumax = over_sources(memory), summary(e for e in memory if "SimuMax" in e.record.source.title)
    return [
        Target("peak memory, median", 0.03, peak and peak.median),
        Target("peak memory, mean", 0.06, peak and peak.mean),
        Target("peak memory, 90th percentile", 0.12, peak and peak.p90),
        Target("peak memory of SimuMax's rows, mean", 0.014, simumax and simumax.mean),
        Target("fits facts called fitting", 0.97, _share(held, _fits, lambda h: h.predicted.fits), at_least=True),
        Target("OOM facts called OOM", 0.90, _share(held, _oom, lambda h: not h.predicted.fits), at_least=True),
        *_time(found, best),
        *_regrets(held),
        Target("records refused", 0.05, statistics.fmean(h.predicted.refused is not None for h in held)),
    ]


def graded(held: Sequence[Held]) -> list[Error]:
    """Of records of quality A."""
    return [error for error in all_errors(held) if error.record.quality == "A"]


def usual_pretraining(found: Sequence[Error]) -> list[Error]:
    """Step times on the GPUs that most is known of."""
    times = [e for e in found if e.kind == "time" and e.record.category == "pretrain"]
    return [e for e in times if e.record.gpu.type in _CALIBRATED_GPUS]


def on_other_gpus(found: Sequence[Error]) -> list[Error]:
    """Step times on all others."""
    return [e for e in found if e.kind == "time" and e.record.gpu.type not in _CALIBRATED_GPUS]


def called_wrong(held: Sequence[Held]) -> list[Held]:
    """Facts about memory that are called wrong: what ran out and is said to fit, and the other way round."""
    known = [h for h in held if h.predicted.refused is None and (_fits(h) or _oom(h))]
    return [h for h in known if bool(h.predicted.fits) == _oom(h)]


def confusion(held: Sequence[Held]) -> dict[str, tuple[int, int]]:
    """By fact about memory: (records that are called so, records of which it is known)."""
    known = [h for h in held if h.predicted.refused is None]
    fitted, ran_out = [h for h in known if "fits" in h.record.tags], [h for h in known if _oom(h)]
    return {
        "fitted": (sum(bool(h.predicted.fits) for h in fitted), len(fitted)),
        "ran out of memory": (sum(not h.predicted.fits for h in ran_out), len(ran_out)),
    }


def _time(found: Sequence[Error], best: Sequence[Error]) -> list[Target]:
    usual, other = over_sources(usual_pretraining(best)), over_sources(on_other_gpus(best))
    calculon = summary(e for e in found if e.kind == "time" and "calculon" in e.record.source.title)
    vtrain = summary(e for e in found if e.kind == "time" and "multi-node validation" in e.record.source.title)
    return [
        Target("step time, A100 and H100 pretraining, mean", 0.08, usual and usual.mean),
        Target("step time of calculon's rows, mean", 0.0365, calculon and calculon.mean),
        Target("step time, vTrain's multi-node rows, mean", 0.10, vtrain and vtrain.mean),
        Target("step time on other GPUs, mean", 0.15, other and other.mean),
    ]


def _regrets(held: Sequence[Held]) -> list[Target]:
    found = [sweep.regret for sweep in sweeps(held)]
    return [
        Target("regret on published sweeps, mean", 0.02, statistics.fmean(found) if found else None),
        Target("regret on published sweeps, worst", 0.08, max(found, default=None)),
    ]


def _share(held: Sequence[Held], fact: Callable[[Held], bool], called: Callable[[Held], object]) -> float | None:
    known = [bool(called(h)) for h in held if fact(h) and h.predicted.refused is None]
    return statistics.fmean(known) if known else None


def _fits(held: Held) -> bool:
    return "fits" in held.record.tags and held.record.quality == "A"


def _oom(held: Held) -> bool:
    return bool(held.record.measured.oom)
