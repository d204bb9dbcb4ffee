"""`--multirun`: a plan for each combination of overrides' values, and a table of all before any is launched."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dslaunch.compose import swept
from dslaunch.errors import ConfigError, DslaunchError
from dslaunch.flow import Request, rendered
from dslaunch.launch.sweep import Planned
from dslaunch.output import bar
from dslaunch.planfile import Finding, prediction_from_json
from dslaunch.run.sweeps import Sweep, SweepRun

_MOST = 1000
"""SLURM's arrays take 1,001 tasks, unless a site sets MaxArraySize; a plan takes about half a second."""
_FIGURES = ("layout", "GPU memory", "step", "speed", "cost", "findings")


@dataclass(frozen=True)
class Member:
    """A combination that was planned and rendered."""

    planned: Planned
    findings: tuple[Finding, ...]
    run_root: Path
    at_once: int
    """launcher.slurm.at_once"""


@dataclass(frozen=True)
class Refused:
    """A combination that is a mistake, or whose plan does not fit."""

    run: SweepRun
    error: DslaunchError


def members(request: Request) -> list[Member | Refused]:
    """Every combination of the values, planned and rendered; the last override varies fastest.

    Raises:
        ConfigError: no override has several values, or they make too many combinations.
    """
    if recipe := next((word for word in request.overrides if word.startswith("recipe=") and "," in word), ""):
        raise ConfigError(f"{recipe}: a sweep has one recipe. Give several values of its keys, or launch twice.")
    values = [swept(word) for word in request.overrides]
    if all(len(each) == 1 for each in values):
        raise ConfigError(
            "--multirun: no override has several values, such as training.global_batch=256,512 or "
            "training.seed=range(1,5). A key that is text (env.*, script, launcher.slurm.*) takes a comma as a "
            "part of its value; several are written script=choice(a.py,b.py)."
        )
    count = math.prod(map(len, values))
    if count > _MOST:
        raise ConfigError(f"--multirun: {count:,} combinations. Give fewer values: a sweep has {_MOST:,} at most.")
    several = [index for index, each in enumerate(values) if len(each) > 1]
    combinations = list(itertools.product(*values))
    with bar(f"{len(combinations)} plans", len(combinations)) as advance:
        return [
            advance(_member(replace(request, overrides=words), number, tuple(words[i] for i in several)))
            for number, words in enumerate(combinations, 1)
        ]


def rows(sweep: Sequence[Member | Refused]) -> list[tuple[str, ...]]:
    """(number, a value a swept key, figures and findings), with a heading; of a refused run why it is."""
    runs = recorded(sweep).runs
    heading = ("run", *(word.split("=", 1)[0] for word in runs[0].values), *_FIGURES)
    told = [_figures(each) if isinstance(each, Member) else _refusal(each) for each in sweep]
    return [heading, *((*_values(run), *words) for run, words in zip(runs, told, strict=True))]


def launchable(sweep: Sequence[Member | Refused], *, skip_refused: bool) -> list[Member]:
    """The runs to launch.

    Raises:
        DslaunchError: of the first refused one, where those are not to be left out; or where no other is left.
    """
    refused = [each for each in sweep if isinstance(each, Refused)]
    found = [each for each in sweep if isinstance(each, Member)]
    if refused and not (skip_refused and found):
        first = refused[0]
        others = f" and {len(refused) - 1} more" if refused[1:] else ""
        fix = " --skip-refused launches the others." if found else ""
        raise type(first.error)(
            f"run {first.run.number}{others} of {len(sweep)} refused: {' '.join(first.run.values)}: "
            f"{first.error}\nNothing of the sweep was launched.{fix}"
        ) from first.error
    return found


def recorded(sweep: Sequence[Member | Refused]) -> Sweep:
    """What the sweep's folder says of it."""
    return Sweep(tuple(each.planned.run if isinstance(each, Member) else each.run for each in sweep))


def _member(request: Request, number: int, chosen: tuple[str, ...]) -> Member | Refused:
    run = SweepRun(number, chosen)
    try:
        config, plan, files, findings = rendered(request)
    except DslaunchError as error:
        return Refused(replace(run, refused=str(error)), error)
    return Member(
        Planned(run, plan, files), findings, Path(config.run.root), config.launcher.slurm.at_once
    )


def _values(run: SweepRun) -> tuple[str, ...]:
    return (str(run.number), *(word.split("=", 1)[1] for word in run.values))


def _figures(member: Member) -> tuple[str, ...]:
    planned = member.planned
    found = prediction_from_json(planned.files["prediction.json"], "prediction.json")
    layouts = dict.fromkeys(
        f"TP{each.tp} PP{each.pp} DP{each.dp} ZeRO-{each.zero}" for each in planned.plan.components.values()
    )
    usd = found.usd_per_step
    kinds = Counter(each.severity for each in member.findings)
    return (
        ", ".join(layouts),
        f"{found.allocated_gib:.3g} GiB",
        f"{found.step_time_s:.3g} s",
        f"{found.tokens_per_s:,.0f} tokens/s",
        "no price" if usd is None else f"${usd * planned.plan.training.steps:,.2f}",
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none",
    )


def _refusal(refused: Refused) -> tuple[str, ...]:
    return ("refused", "", "", "", "", str(refused.error).splitlines()[0])
