"""docs/accuracy.md with its plots, and the bands that plans print: `python -m benchmarks.accuracy --write`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import holdout, plots, rows
from benchmarks.bands import bands
from benchmarks.crossval import Held, all_errors
from benchmarks.errors import Error
from benchmarks.regret import sweeps
from benchmarks.statistics import by, over_sources, source_of, summary
from benchmarks.targets import targets
from dslaunch.hardware.efficiency import BANDS

_ROOT = Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "accuracy.md"
_PLOTS = _ROOT / "docs" / "accuracy"


def write(held: Sequence[Held]) -> None:
    """The page, its plots and the bands."""
    found = all_errors(held)
    _PLOTS.mkdir(parents=True, exist_ok=True)
    for kind in ("memory", "time"):
        of_kind = [error for error in found if error.kind == kind]
        plots.predicted_against_measured(of_kind, _PLOTS / f"{kind}.svg")
        plots.error_distribution(of_kind, _PLOTS / f"{kind}-errors.svg")
    BANDS.write_text(json.dumps(bands(found), indent=1) + "\n", encoding="utf-8")
    _PAGE.write_text("\n".join(_lines(held, found)) + "\n", encoding="utf-8")


def _lines(held: Sequence[Held], found: Sequence[Error]) -> list[str]:
    return [
        "# How far predictions are from published runs",
        "",
        "Made by `python -m benchmarks.accuracy --write`. Every figure is cross-validated: what one repository or",
        "paper printed is predicted from tables that were calibrated on the others. Errors are shares of what",
        "was measured; they are taken per source and then averaged over sources, so that no large source hides",
        "the others. `python -m benchmarks.accuracy` prints more: by GPU, framework, kind, peers, and the worst",
        "rows with their ledgers.",
        "",
        *_targets(held),
        "",
        "## Memory",
        "",
        "![Predicted against measured peak memory](accuracy/memory.svg)",
        "![Share of runs within an error, memory](accuracy/memory-errors.svg)",
        "",
        *_by_source([error for error in found if error.kind == "memory"]),
        "",
        "## Time",
        "",
        "![Predicted against measured step time](accuracy/time.svg)",
        "![Share of runs within an error, time](accuracy/time-errors.svg)",
        "",
        *_by_source([error for error in found if error.kind == "time"]),
        "",
        "## Regret",
        "",
        "Published sweeps over layouts of one model on the same GPUs: what the layout that is foreseen as the",
        "fastest took, over the one that was.",
        "",
        "| runs | regret | sweep |",
        "|---:|---:|---|",
        *(f"| {s.runs} | {s.regret:.1%} | {s.name} |" for s in sweeps(held)),
        "",
        (_ROOT / "benchmarks" / "data" / "misses.md").read_text(encoding="utf-8").rstrip(),
        "",
        "## The rows behind what is missed",
        "",
        "What each run adds to the mean over sources: its error, by the runs of its source and the number of",
        "sources. Errors are cross-validated; the terms are those of the shipped rates, of the slowest stage.",
        *rows.lines(held),
        "",
        *holdout.lines(),
    ]


def _targets(held: Sequence[Held]) -> list[str]:
    lines = ["| | reached | target |", "|---|---:|---:|"]
    for target in targets(held):
        sign = "at least " if target.at_least else ""
        lines.append(
            f"| {target.name} | {target.shown}{'' if target.met else ' (missed)'} | {sign}{target.wanted:.2%} |"
        )
    return lines


def _by_source(found: Sequence[Error]) -> list[str]:
    lines = ["| source | runs | median | mean | 90 % | worst | bias |", "|---|---:|---:|---:|---:|---:|---:|"]
    rows = [(name, summary(group)) for name, group in by(found, source_of).items()]
    for name, s in [*rows, ("averaged over sources", over_sources(found))]:
        if s:
            figures = " | ".join(f"{value:.1%}" for value in (s.median, s.mean, s.p90, s.worst))
            lines.append(f"| {name} | {s.count} | {figures} | {s.bias:+.1%} |")
    return lines
