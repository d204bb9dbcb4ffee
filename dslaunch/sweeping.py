"""`--multirun`: a plan for each combination of overrides' values; a table of all first, then one launch each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dslaunch.errors import ConfigError, DslaunchError
from dslaunch.flow import Request, rendered
from dslaunch.output import bar
from dslaunch.planfile import Plan, prediction_from_json
from dslaunch.schema.text import is_text

_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    chosen: tuple[str, ...]
    """Its values of the overrides that have several."""
    plan: Plan
    files: dict[str, str]
    run_root: Path


def members(request: Request) -> list[Member]:
    """Every combination of the values, planned and rendered; the last override varies fastest.

    Raises:
        ConfigError: no override has several values, or one of the plans is a mistake.
        PlanError: one of the plans does not fit.
    """
    values = [_values(word) for word in request.overrides]
    if all(len(each) == 1 for each in values):
        raise ConfigError(
            "--multirun: no override has several values, such as training.global_batch=256,512. A key that is "
            "text (env.*, script, launcher.slurm.*) takes a comma as a part of its value."
        )
    several = [index for index, each in enumerate(values) if len(each) > 1]
    combinations = list(itertools.product(*values))
    with bar(f"{len(combinations)} plans", len(combinations)) as advance:
        return [
            advance(_member(replace(request, overrides=words), tuple(words[index] for index in several)))
            for words in combinations
        ]


def rows(sweep: Sequence[Member]) -> list[tuple[str, ...]]:
    """(number, values, layouts, memory, step, speed) of each member, with a heading."""
    return [("run", "values", "layout", "GPU memory", "step", "speed"), *map(_row, itertools.count(1), sweep)]


def launch_all(sweep: Sequence[Member], start: Callable[[Member], int], echo: Callable[[str], None]) -> int:
    """Start one member after the other; a submitted one returns at once. 0 where all did well, else 1."""
    statuses = []
    for number, member in enumerate(sweep, 1):
        echo(f"run {number} of {len(sweep)}: {' '.join(member.chosen)}")
        statuses.append(start(member))
    failed = [str(number) for number, status in enumerate(statuses, 1) if status]
    if failed:
        echo(f"run {', '.join(failed)} of {len(sweep)} failed")
    return 1 if failed else 0


def _member(request: Request, chosen: tuple[str, ...]) -> Member:
    try:
        config, plan, files, _ = rendered(request)
    except DslaunchError as error:
        raise type(error)(f"{' '.join(chosen)}: {error}\nNothing of the sweep was launched.") from error
    return Member(chosen, plan, files, Path(config.run.root))


def _row(number: int, member: Member) -> tuple[str, ...]:
    found = prediction_from_json(member.files["prediction.json"], "prediction.json")
    layouts = dict.fromkeys(
        f"TP{each.tp} PP{each.pp} DP{each.dp} ZeRO-{each.zero}" for each in member.plan.components.values()
    )
    return (
        str(number),
        " ".join(member.chosen),
        ", ".join(layouts),
        f"{found.allocated_gib:.3g} GiB",
        f"{found.step_time_s:.3g} s",
        f"{found.tokens_per_s:,.0f} tokens/s",
    )


def _values(word: str) -> list[str]:
    """KEY=A,B as KEY=A and KEY=B; a comma in brackets or quotes, or of a key that is text, separates nothing."""
    key, _, text = word.partition("=")
    if is_text(tuple(key.split("."))):
        return [word]
    return [f"{key}={value}" for value in _parts(text)]


def _parts(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
