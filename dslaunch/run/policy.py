"""What follows when an attempt has ended: the policy of its cause, within the run's limits on restarts.

The rule of counting: a restart counts against restart.max, and against its cause's limit, only if it brought no
new step, that is, if the run did not get further than in any attempt before it. So a run that moves on is
restarted as often as it takes, and one that fails at the same place is not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from dslaunch.planfile import SupervisionPlan

_LONGEST_WAIT_S = 600.0


@dataclass(frozen=True)
class Policy:
    """One cause, by what it is known, and what is done about it; the fields are those of causes.yaml."""

    cause: str
    says: str
    action: str
    next: str
    limit: int | None = None
    unfit: bool = False
    """The host where it began answers, and is no good all the same: an elastic run goes on without it."""
    exits: tuple[int, ...] = ()
    text: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Past:
    """One attempt that has ended."""

    cause: str
    furthest: int
    """The last step that every rank completed; 0 where none was."""


@dataclass(frozen=True)
class Decision:
    """What is done now."""

    action: str
    """stop | retry | retry_elsewhere | requeue."""
    why: str
    wait_s: float = 0.0
    """Before the next attempt."""


@functools.cache
def policies() -> dict[str, Policy]:
    """By cause, in the order in which evidence is looked for."""
    rows = yaml.safe_load((resources.files("dslaunch.run") / "causes.yaml").read_text(encoding="utf-8"))
    made = [
        Policy(**{**row, "exits": tuple(row.get("exits", ())), "text": tuple(row.get("text", ()))}) for row in rows
    ]
    return {policy.cause: policy for policy in made}


def decide(plan: SupervisionPlan, past: Sequence[Past]) -> Decision:
    """What follows on the attempts so far, the newest last."""
    cause = past[-1].cause
    policy = policies()[cause]
    action = plan.restart_actions.get(cause, policy.action)
    if action == "stop":
        return Decision("stop", f"{cause} is not retried")
    fruitless = _fruitless(past)
    counted = sum(fruitless)
    if counted >= plan.restart_max:
        return Decision("stop", _used_up(plan.restart_max, counted))
    in_a_row = 0
    for before, idle in zip(reversed(past[:-1]), reversed(fruitless), strict=True):
        if not idle or before.cause != cause:
            break
        in_a_row += 1
    if policy.limit is not None and in_a_row >= policy.limit:
        return Decision("stop", f"{cause} came again without a new step in between ({in_a_row} restarts)")
    wait_s = min(plan.restart_wait_s * 2**counted, _LONGEST_WAIT_S)
    why = f"restart {len(past)}, {counted} of {plan.restart_max} without a new step so far"
    return Decision(action, why, wait_s)


def _fruitless(past: Sequence[Past]) -> list[bool]:
    """For each restart (the attempts after the first), whether it brought no new step."""
    furthest = past[0].furthest
    found = []
    for attempt in past[1:]:
        found.append(attempt.furthest <= furthest)
        furthest = max(furthest, attempt.furthest)
    return found


def _used_up(most: int, counted: int) -> str:
    if most == 0:
        return "restart.max is 0 (the default without checkpoint.every)"
    return f"{counted} restarts brought no new step, and restart.max is {most}"
