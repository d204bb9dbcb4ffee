"""What rank.sh puts around, and before, the program of a profiled rank."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from dslaunch.planfile import Plan

FILE = "profiled.py"
"""Written into the run folder where ranks are profiled."""
COUNTERS = "gpus.py"
"""Written into the run folder where a host's GPUs are watched."""
CORES = "cores.py"
"""Written into the run folder where ranks are kept to cores."""
_STEPS_BY_PARTS = frozenset({"deepspeed", "native", "megatron_deepspeed"})
"""Engines under which DeepSpeed's engine tells the steps."""


@dataclass(frozen=True)
class ProfileContext:
    """The part of the context that rank.sh places."""

    kind: str
    """torch | nsys"""
    ranks: tuple[int, ...]
    arguments: tuple[str, ...]
    """The first arguments of profiled.py, each a shell word."""
    nsys_options: tuple[str, ...]
    """Options of `nsys profile` beside the output's name, each a shell word."""


def profile_context(plan: Plan) -> ProfileContext | None:
    """None where nothing is profiled."""
    wanted = plan.profile
    if not wanted.kind:
        return None
    counted = "deepspeed" if plan.engine.name in _STEPS_BY_PARTS else "torch"
    ranges = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true")
    return ProfileContext(
        kind=wanted.kind,
        ranks=wanted.ranks,
        arguments=(wanted.kind, counted, str(wanted.first_step), str(wanted.steps)),
        nsys_options=tuple(_element(word) for word in (*ranges, *wanted.nsys_options)),
    )


def profiled_program() -> str:
    """The text of profiled.py."""
    return Path(__file__).with_name(FILE).read_text(encoding="utf-8")


def counts(plan: Plan) -> bool:
    """Whether GPUs are watched: NVIDIA's, unless nsys has their counters."""
    return plan.cluster.accelerator == "cuda" and plan.profile.kind != "nsys"


def binding_program() -> str:
    """The text of cores.py."""
    return Path(__file__).with_name(CORES).read_text(encoding="utf-8")


def counting_program() -> str:
    """The text of gpus.py."""
    return Path(__file__).with_name(COUNTERS).read_text(encoding="utf-8")


def _element(word: str) -> str:
    """Of a bash array: a comma is in quotes, so that nobody takes it for what parts the elements."""
    quoted = shlex.quote(word)
    return f"'{word}'" if "," in word and quoted == word else quoted
