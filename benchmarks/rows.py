"""The rows behind the targets that are missed: what each adds to the error, and the terms of its prediction."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.crossval import Held
from benchmarks.errors import Error
from benchmarks.predict import ledger, peak_gib
from benchmarks.regret import sweeps
from benchmarks.settings import setting
from benchmarks.statistics import by, source_of
from benchmarks.targets import called_wrong, graded, on_other_gpus, targets, usual_pretraining

_SHOWN = 15
_REGRET = 0.02


def lines(held: Sequence[Held]) -> list[str]:
    """Tables in Markdown, one for each missed target that rows add up to; the shipped tables make the ledgers."""
    missed = {target.name for target in targets(held) if not target.met}
    found = graded(held)
    groups = {
        "step time, A100 and H100 pretraining, mean": usual_pretraining(found),
        "step time on other GPUs, mean": on_other_gpus(found),
        "step time of calculon's rows, mean": [
            e for e in found if e.kind == "time" and "calculon" in e.record.source.title
        ],
    }
    out: list[str] = []
    for name, rows in groups.items():
        if name in missed:
            out += ["", f"### {name[0].upper()}{name[1:]}", "", *_adding_most(rows)]
    if any(name.startswith("regret") for name in missed):
        out += ["", "### Regret", "", *_regrets(held)]
    if any("called" in name for name in missed):
        out += ["", "### Facts about memory that are called wrong", "", *_called_wrong(held)]
    return out


def _adding_most(rows: Sequence[Error]) -> list[str]:
    """The rows by what they add to the mean: their error, by the rows of their source and the sources."""
    sources = by(rows, source_of)
    share = {name: 1 / len(group) / len(sources) for name, group in sources.items()}
    worst = sorted(rows, key=lambda e: -abs(e.relative) * share[source_of(e.record)])[:_SHOWN]
    table = ["| adds | error | measured | run | the prediction's largest terms, s |", "|---:|---:|---:|---|---|"]
    for e in worst:
        terms = ", ".join(ledger(e.record, e.kind).split(", ")[:3])
        adds = abs(e.relative) * share[source_of(e.record)]
        table.append(f"| {adds:.2%} | {e.relative:+.1%} | {e.measured:.4g} s | {e.record.id} | {terms} |")
    return table


def _regrets(held: Sequence[Held]) -> list[str]:
    found = [sweep for sweep in sweeps(held) if sweep.regret > _REGRET]
    return [
        "| regret | picked | best |",
        "|---:|---|---|",
        *(f"| {s.regret:.1%} | {s.picked} | {s.best} |" for s in sorted(found, key=lambda s: -s.regret)),
    ]


def _called_wrong(held: Sequence[Held]) -> list[str]:
    table = ["| run | known | predicted | the GPU has |", "|---|---|---:|---:|"]
    for each in called_wrong(held):
        run = setting(each.record)
        fact = "out of memory" if each.record.measured.oom else "fitted"
        need, has = peak_gib(run, "allocated"), run.config.cluster.gpu.memory_gib
        table.append(f"| {each.record.id} | {fact} | {need:.1f} GiB | {has:.1f} GiB |")
    return table
