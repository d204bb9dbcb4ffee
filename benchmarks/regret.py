"""What it would have cost to trust the planner's choice among layouts that were all measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.crossval import Held
from benchmarks.errors import Error, errors


@dataclass(frozen=True)
class Sweep:
    """Runs of one model on the same GPUs that differ in layout."""

    name: str
    runs: int
    picked: str
    """Id of a run of the layout that is foreseen as the fastest."""
    best: str
    """Of the layout that was."""
    regret: float
    """Measured step time of the picked layout over the best one's, less 1; a layout that was measured more than
    once has the mean of its times."""


def sweeps(held: Sequence[Held]) -> list[Sweep]:
    """Every sweep of two layouts or more, the largest first."""
    groups: dict[str, list[Error]] = {}
    for each in held:
        for error in errors(each.record, each.predicted):
            if error.kind == "time":
                groups.setdefault(_sweep_of(error), []).append(error)
    found = [_sweep(name, runs) for name, runs in groups.items() if len({_layout(run) for run in runs}) > 1]
    return sorted(found, key=lambda sweep: (-sweep.runs, sweep.name))


def _sweep(name: str, runs: list[Error]) -> Sweep:
    repeated: dict[tuple[object, ...], list[Error]] = {}
    for run in runs:  # one layout under other software has another prediction
        repeated.setdefault((*_layout(run), run.predicted), []).append(run)
    layouts = [(alike[0], fmean(run.measured for run in alike)) for alike in repeated.values()]
    picked, took = min(layouts, key=lambda layout: layout[0].predicted)
    best, least = min(layouts, key=lambda layout: layout[1])
    return Sweep(name, len(runs), picked.record.id, best.record.id, took / least - 1)


def _sweep_of(error: Error) -> str:
    """What must be alike for two runs to be rivals."""
    r = error.record
    shape = f"{r.model.layers} layers of {r.model.hidden} with {r.model.heads} heads"
    alike = (
        r.source.title, r.model.name, shape, r.gpu.type, r.n_gpus, r.seq_len, r.global_batch, r.precision,
        r.category, r.framework_version,
    )  # fmt: skip
    return ", ".join(str(part) for part in alike if part is not None)


def _layout(error: Error) -> tuple[object, ...]:
    r = error.record
    return (r.tp, r.pp, r.vpp, r.cp, r.ep, r.micro_batch, r.zero_stage, r.recompute, r.recompute_detail)
