"""What a search says of itself: the candidates, the front, the engines; or why nothing is legal and fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dslaunch.engines.registry import ENGINES
from dslaunch.errors import PlanError, listed
from dslaunch.hardware.topology import describe
from dslaunch.model.shapes import divisors
from dslaunch.plan.engine_choice import candidates as searched
from dslaunch.plan.engine_choice import engine_faults, left_out
from dslaunch.plan.front import SLOWER, Scored
from dslaunch.plan.joint import Wanted
from dslaunch.plan.layouts import pinned, resolve
from dslaunch.plan.notes import Notes
from dslaunch.plan.options import Misfit
from dslaunch.plan.search import Found
from dslaunch.plan.sharding import variants
from dslaunch.plan.space import order_words
from dslaunch.planfile import Candidate, Search
from dslaunch.schema.config import RunConfig

_SHOWN = 4
"""Refusals."""


def words(found: Scored) -> str:
    """The layouts in words; components that share one are named together."""
    names: dict[str, list[str]] = {}
    for name, layout in found.layouts.items():
        names.setdefault(f"{layout.describe()} micro-batch {layout.micro_batch}", []).append(name)
    shown = ", ".join(f"{'+'.join(group)} {layout}" for layout, group in names.items())
    return f"{found.who}: {shown}{order_words(found.schedule)}"


def candidates(found: Found) -> tuple[Candidate, ...]:
    """The winner, the next best, and the refusals for memory that lack least of those that were fast enough."""
    best = [each for each in found.front.best if each is not found.chosen]
    slowest = math.inf if found.front.by_memory else SLOWER * found.chosen.step_s
    rows = [_candidate(found.chosen, "chosen"), *(_candidate(e, _behind(found.chosen, e)) for e in best)]
    refused = [
        Candidate(f"{who}: {misfit.describe()}", 0.0, 0.0, f"refused: {misfit.reason}")
        for who, misfit in _nearest(found.notes, slowest)
    ]
    return (*rows, *refused)


def report(found: Found) -> Search:
    """The rest of what prediction.json keeps of a search."""
    front = tuple(_candidate(each, _behind(found.chosen, each)) for each in found.front.near())
    return Search(found.goal, found.notes.considered, front, _engines(found))


def nothing_fits(config: RunConfig, wanted: Wanted, notes: Notes) -> PlanError:
    """Why a search came to nothing: the figures of what lacks least, and what each engine refuses."""
    cluster = describe(config.cluster)
    if not notes.considered:
        faults = "\n".join(resolve(config, wanted)[1] or _illegal(notes) or [_no_whole_parts(config)])
        return PlanError(f"strategy=auto: no layout on {cluster} goes with what is set.\n{faults}")
    lines = [f"strategy=auto: none of {notes.considered} layouts is legal and fits on {cluster}."]
    if not notes.misfits:
        lines += resolve(config, wanted)[1]
    if notes.misfits:
        lines += [f"{sum(m.layouts for _, m in notes.misfits)} need too much memory; nearest:"]
        lines += [f"  {who}: {m.describe()}: {m.reason}" for who, m in _nearest(notes)]
        lines += ["Use more GPUs, a smaller training.seq_len, or GPUs with more memory."]
    return PlanError("\n".join([*lines, *_illegal(notes)]))


def _no_whole_parts(config: RunConfig) -> str:
    """Why no layout's micro-batches come out whole."""
    batch, parts = config.training.global_batch, config.training.macro_batches
    if batch % parts == 0:
        return "no layout has whole parts"
    whole = [part for part in divisors(batch) if 1 < part < batch]
    return (
        f"training.macro_batches is {parts}: a step has training.global_batch / (micro_batch x dp) "
        f"micro-batches, and no such part of {batch} divides by {parts}. It can be {listed(whole, 8) or 1}, or be "
        "left out"
    )


def _nearest(notes: Notes, at_most_s: float = math.inf) -> list[tuple[str, Misfit]]:
    """Those that lack least memory, of what a step may take less time with."""
    rows = sorted(notes.misfits, key=lambda row: row[1].over)
    timely = (row for row in rows if at_most_s == math.inf or row[1].at_least_s() <= at_most_s)
    return list(itertools.islice(timely, _SHOWN))


def _illegal(notes: Notes) -> list[str]:
    return [f"engine {name}: {'; '.join(faults[:2])}" for name, faults in notes.illegal.items()]


def _candidate(found: Scored, verdict: str) -> Candidate:
    return Candidate(words(found), found.peak_gib, found.step_s, verdict)


def _behind(best: Scored, other: Scored) -> str:
    if other is best:
        return "chosen"
    less = best.peak_gib - other.peak_gib
    memory = f", {less:.1f} GiB less" if less >= 0.05 else f", {-less:.1f} GiB more" if less <= -0.05 else ""
    return f"time x{other.step_s / best.step_s:.3f}{memory}"


def _engines(found: Found) -> dict[str, str]:
    """By engine that was searched: its best, or why it is out."""
    best: dict[str, Scored] = {}
    every: Sequence[Scored] = [found.chosen, *found.front.best, *found.front.skyline]
    for each in every:
        if each.engine not in best or each.step_s < best[each.engine].step_s:
            best[each.engine] = each
    verdicts = {name: _verdict(found, best.get(name), name) for name in searched(found.config)}
    return {**verdicts, **left_out(found.config)}


def _verdict(found: Found, best: Scored | None, name: str) -> str:
    if name == found.chosen.engine:
        return "chosen"
    if best is not None:
        return f"its best here: {_behind(found.chosen, best)}"
    if name in found.notes.passed:
        return "nothing of it that fits is faster, or takes less memory in the time"
    if misfits := [(who, m) for who, m in found.notes.misfits if who.split(":")[0].split()[0] == name]:
        who, nearest = min(misfits, key=lambda row: row[1].over)
        return f"nothing fits; nearest: {who}: {nearest.describe()}: {nearest.reason}"
    return f"refused: {(found.notes.illegal.get(name) or _as_pinned(found.config, name))[0]}"


def _as_pinned(config: RunConfig, engine: str) -> list[str]:
    """What an engine that has no layout at all has against what is pinned."""
    config, wanted = next(variants(config, ENGINES[engine], pinned(config)))
    layouts, faults = resolve(config, wanted)
    return [*engine_faults(config, layouts, engine), *faults, "no layout of it has whole parts"]
