"""Predicted against measured, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks.errors import Error

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "dslaunch"

from matplotlib import pyplot  # noqa: E402  the backend has to be chosen first

_AXES = {"memory": "peak memory, GiB", "time": "step time, s"}


def predicted_against_measured(errors: Sequence[Error], file: Path) -> None:
    """A scatter on logarithmic axes, a colour for each framework family, with the lines of +-10 %."""
    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    for family, group in sorted(_by_family(errors).items()):
        axes.loglog(
            [e.measured for e in group],
            [e.predicted for e in group],
            ".",
            label=f"{family} ({len(group)})",
            alpha=0.6,
        )
    ends = [min(e.measured for e in errors), max(e.measured for e in errors)]
    axes.loglog(ends, ends, color="black", linewidth=0.8)
    for share in (0.9, 1.1):
        axes.loglog(ends, [share * end for end in ends], color="grey", linewidth=0.6, linestyle="--")
    kind = errors[0].kind
    axes.set_xlabel(f"measured {_AXES[kind]}")
    axes.set_ylabel(f"predicted {_AXES[kind]}")
    axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def error_distribution(errors: Sequence[Error], file: Path) -> None:
    """The share of runs within each error."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for family, group in sorted(_by_family(errors).items()):
        sizes = sorted(abs(e.relative) for e in group)
        axes.step(
            [100 * s for s in sizes], [100 * (i + 1) / len(sizes) for i in range(len(sizes))], label=family
        )
    axes.set_xlim(0, 50)
    axes.set_xlabel("error, % of what was measured")
    axes.set_ylabel("runs within it, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _by_family(errors: Sequence[Error]) -> dict[str, list[Error]]:
    groups: dict[str, list[Error]] = {}
    for error in errors:
        groups.setdefault(error.family, []).append(error)
    return groups
