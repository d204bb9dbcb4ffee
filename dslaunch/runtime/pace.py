"""The speed of the first steps against the plan's: said once, and an error where it is below its bound.

The first step compiles, connects and allocates, and is left out; the median of the next few is what counts, so
that one that was disturbed decides nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import torch
import torch.distributed as dist

from dslaunch.planfile import Plan, Prediction
from dslaunch.runtime.proof import NotDistributedError
from dslaunch.runtime.world import World

STEPS = 5
"""Steps behind the first whose median is held to the plan's."""
DEFAULT = 0.5
"""Share of the speed at the slow end of the plan's error band: the bound where the user gave none. Convention:
half of what nine of ten published runs keep is no error of the plan's figures any more."""
_COMPUTING = ("compute", "recompute")
"""Terms of the time ledger."""


class TooSlowError(NotDistributedError):
    """The first steps are slower than the plan allows; the same on every rank."""


class Pace:
    """The first steps of one attempt; every rank has one, and calls it alike."""

    def __init__(self, plan: Plan, prediction: Prediction | None, world: World) -> None:
        self._plan, self._prediction, self._world = plan, prediction, world
        self._first = 0
        self._seconds: list[float] = []

    def took(self, step: int, seconds: float) -> str:
        """What is said of step number `step` (from 1), behind the first: empty until STEPS are measured.

        Raises:
            TooSlowError: they are slower than their bound, on every rank alike.
        """
        if len(self._seconds) >= STEPS:
            return ""
        self._first = self._first or step
        self._seconds.append(seconds)
        return self._judged() if len(self._seconds) == STEPS else ""

    def ended(self) -> str:
        """What is said of a run that ends before there are STEPS: its speed, held to nothing."""
        return self._judged() if 0 < len(self._seconds) < STEPS else ""

    def _judged(self) -> str:
        if self._prediction is None:
            return "no prediction.json of this plan is beside it, so that the speed is held to nothing"
        slowest = torch.tensor(statistics.median(self._seconds), dtype=torch.float64, device=self._world.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        measured = float(slowest)
        said = f"{self._steps()} took {measured:.3g} s{' each (median)' if len(self._seconds) > 1 else ''}; "
        said += compared(measured, self._plan, self._prediction)
        bound, why = bound_of(self._plan, self._prediction)
        if len(self._seconds) < STEPS:
            return f"{said}; not held to a bound, for which {STEPS} steps behind the first are measured"
        if not bound:
            return f"{said}; not held to a bound: {why}"
        if self._prediction.step_time_s < bound * measured:
            raise TooSlowError(f"{said}; the bound is {bound:.0%} ({why}).\n{_NEXT}")
        return f"{said}; the bound is {bound:.0%} ({why})"

    def _steps(self) -> str:
        last = self._first + len(self._seconds) - 1
        return f"steps {self._first} to {last}" if last > self._first else f"step {last}"


_NEXT = """\
  Look for a slow host, GPU or link (`dslaunch preflight`) and a slow data loader; profile=torch shows what a step
  waits for. Where it is the plan that is wrong: `dslaunch calibrate`, or a lower watchdog.min_speed (0: none)."""


def compared(measured_s: float, plan: Plan, prediction: Prediction) -> str:
    """The share of the planned speed; on GPUs, whose rates were measured, the scaling efficiencies too."""
    planned = prediction.step_time_s
    said = f"the plan says {planned:.3g} s: {planned / measured_s:.0%} of the planned speed"
    if plan.cluster.accelerator == "cpu":
        return said
    computed = _computed_s(plan, prediction)
    return f"{said} (scaling efficiency {computed / measured_s:.0%}, planned {computed / planned:.0%})"


def bound_of(plan: Plan, prediction: Prediction) -> tuple[float, str]:
    """(least share of the planned speed, where it comes from); (0, why there is none)."""
    given, band = plan.supervision.min_speed, prediction.time_band
    if given is not None:
        return given, "watchdog.min_speed" if given else "watchdog.min_speed is 0"
    if plan.cluster.accelerator == "cpu":
        return 0.0, "ranks share a host's cores, whose speed the plan does not know; watchdog.min_speed sets one"
    if band is None:
        return 0.0, "the plan's time has no error band; watchdog.min_speed sets one"
    return DEFAULT / band.high, f"{DEFAULT:.0%} of the slow end of the plan's error band"


def _computed_s(plan: Plan, prediction: Prediction) -> float:
    """What the busiest rank computes in a step by the plan, seconds."""
    by_rank: dict[int, float] = defaultdict(float)
    for name, stages in prediction.components.items():
        for stage, predicted in zip(plan.components[name].stages, stages, strict=True):
            for rank in stage.ranks:
                by_rank[rank] += sum(predicted.time_s.get(term, 0.0) for term in _COMPUTING)
    return max(by_rank.values())
