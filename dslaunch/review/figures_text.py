"""Figures as a reader sees them: units, changes, values of plan keys."""

from __future__ import annotations

import json
from typing import Any

from dslaunch.review.changes import Figure, KeyChange

_LONG = 60


def amount(value: float | None, unit: str) -> str:
    """A figure with as many digits as it is worth, without its unit; `-` where it is not known."""
    if value is None:
        return "-"
    if unit in ("GiB", "%"):
        return f"{value:.1f}"
    if unit == "s" and value < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def name_of(figure: Figure) -> str:
    """`step, s`."""
    return f"{figure.name}, {figure.unit}" if figure.unit else figure.name


def change_of(figure: Figure) -> str:
    """`+12.5 %`, `of 80 GiB`, both, or nothing."""
    moved = figure.change
    said = [] if moved is None or abs(moved) < 0.0005 else [f"{moved:+.1%}".replace("%", " %")]
    if figure.of:
        said.append(f"of {figure.of:g} {figure.unit}")
    return ", ".join(said)


def value(change_value: Any) -> str:
    """A plan's value on one line, cut where it is long; `(none)` where the key is not there."""
    if change_value is None:
        return "(none)"
    text = change_value if isinstance(change_value, str) else json.dumps(change_value, ensure_ascii=False)
    text = " ".join(text.split()) or "(empty)"
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def sentence(change: KeyChange) -> str:
    """`training.lr: 2e-05 -> 3e-05`."""
    return f"{change.key}: {value(change.before)} -> {value(change.after)}"
