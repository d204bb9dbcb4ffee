"""Where a fault is, from a run's failure and from its repetition on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.run.failure import Failure
from dslaunch.run.policy import policies

_ENVIRONMENT = ("host_lost", "gpu_fault", "host_memory", "disk_full", "preempted", "port_taken", "killed")
"""Causes of which the supervisor itself saw that they came from outside of the program."""
_NEXT = {
    "model_and_data": "repeat it under a debugger, alone: bash {folder}/rank.sh with the variables of its log",
    "communication": (
        "look at what the ranks do differently: a collective that not all of them call, in the same order, with "
        "the same shapes (TORCH_DISTRIBUTED_DEBUG=DETAIL names it); `dslaunch preflight` measures the network"
    ),
    "environment": "`dslaunch preflight` on the run's hosts, then `dslaunch resume`",
    "unclear": "give more time (--minutes), or name the step that fails (--step)",
}


@dataclass(frozen=True)
class Repeated:
    """How the repetition ended."""

    outcome: str
    """passed (it came beyond the step that failed, or to its end) | failed | stopped | out of time"""
    failure: Failure
    status: int
    """Its exit status."""


@dataclass(frozen=True)
class Verdict:
    """Where the fault is."""

    place: str
    """model_and_data | communication | environment | unclear"""
    why: str
    next: str


@dataclass(frozen=True)
class Triage:
    """What `dslaunch triage --json` prints."""

    run: str
    """Its name."""
    cause: str
    """As the supervisor judged the run's end."""
    step: int
    """The first step that not every rank completed."""
    error: str
    """The exception of the rank that failed first."""
    repeated_as: str
    """Where the repetition ran, in words."""
    repeated_from: str
    """The checkpoint, or the beginning."""
    repeated_to: int
    """The last step that it completed."""
    repeated_error: str
    """The exception that the repetition ended with; empty where it passed."""
    folder: str
    """What the repetition ran and said."""
    preflight: tuple[str, ...]
    """What stops a launch on the run's hosts now."""
    verdict: str
    """model_and_data | communication | environment | unclear"""
    why: str
    """The evidence, in one sentence."""
    next: str
    """What to do."""
    schema: str = "dslaunch.triage/1"


def judged(cause: str, failure: Failure, repeated: Repeated, findings: Sequence[str]) -> Verdict:
    """The verdict.

    Args:
        cause: of the run's end, as the supervisor judged it; empty where nobody saw it.
        findings: what stops a launch on the run's hosts now.
    """
    place, why = _place(cause, failure, repeated, findings)
    known = place == "environment" and cause in policies()
    return Verdict(place, why, policies()[cause].next if known else _NEXT[place])


def _place(cause: str, failure: Failure, repeated: Repeated, findings: Sequence[str]) -> tuple[str, str]:
    if repeated.outcome in ("stopped", "out of time"):
        return "unclear", f"the repetition is {repeated.outcome} at step {repeated.failure.step}: {_at(failure)}"
    if repeated.outcome == "failed":
        return _failed_too(failure, repeated)
    passes = f"alone it passes step {failure.step}"
    if cause in _ENVIRONMENT:
        return "environment", f"{passes}; the run ended because {policies()[cause].says}"
    if findings:
        return "environment", f"{passes}; a launch on the run's hosts stops at {findings[0]}"
    return "communication", f"{passes}, where the run's ranks failed: {_at(failure)}"


def _failed_too(failure: Failure, repeated: Repeated) -> tuple[str, str]:
    mine = repeated.failure.said[0] if repeated.failure.said else None
    same = next((said for said in failure.said if mine and mine.like(said)), None)
    at = repeated.failure.step
    if same and at == failure.step:
        return "model_and_data", f"alone it fails likewise, at the same step {at}: {mine}"
    if same:
        return "model_and_data", f"alone it fails likewise, at step {at} instead of {failure.step}: {mine}"
    said = str(mine) if mine else f"exit status {repeated.status}"
    if at < failure.step:
        return "unclear", f"alone it fails before that, at step {at}, for another reason: {said}"
    return "model_and_data", f"alone it fails too, at step {at}, as {said}; the run said {_at(failure)}"


def _at(failure: Failure) -> str:
    return str(failure.said[0]) if failure.said else "no rank said why"
