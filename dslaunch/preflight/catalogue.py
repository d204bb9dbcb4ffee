"""The checks as data: what each is about, whether it stops a launch, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from dslaunch.errors import ConfigError, listed, nearest


@dataclass(frozen=True)
class Check:
    id: str
    severity: str
    """error (stops a launch) | warning"""
    about: str
    why: str
    fix: str


@cache
def checks() -> dict[str, Check]:
    """By id, in the order of checks.yaml."""
    text = Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8")
    return {id: Check(id, **fields) for id, fields in yaml.safe_load(text).items()}


def require_known(ids: tuple[str, ...]) -> None:
    """Raises ConfigError where preflight.ignore names no check."""
    for id in ids:
        if id not in checks():
            there = listed(checks(), limit=60)
            raise ConfigError(f"preflight.ignore: {id}: no such check. There are {there}.{nearest(id, checks())}")


def page(id: str) -> str:
    """What `dslaunch explain` prints of a check."""
    check = checks()[id]
    stops = "stops a launch" if check.severity == "error" else "is told, and stops nothing"
    return f"{check.id}: {check.about}\n{check.severity}: it {stops}\n\n{check.why}\n\nWhat to do: {check.fix}\n"
