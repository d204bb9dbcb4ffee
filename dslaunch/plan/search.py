"""strategy=auto: every legal layout of the trunk is tried, and the fastest that fits is taken.

What the user pinned stays. Components beside the trunk share its layout where it has no tp and pp, and else
run data-parallel over all ranks at ZeRO-2. A component without a micro_batch of its own gets the largest
divisor of training.micro_batch that is legal, 1 where none is; smaller ones, and then offload, only where
nothing else fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from dslaunch.errors import PlanError
from dslaunch.hardware.topology import describe, tensor_domain
from dslaunch.model import shapes
from dslaunch.plan.batch import whole_micro_batch
from dslaunch.plan.evaluate import Evaluated
from dslaunch.planfile import Candidate
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy


@dataclass(frozen=True)
class Refused:
    """Why a layout is not taken."""

    reasons: tuple[str, ...]
    excess: float | None = None
    """GPU and host memory that it needs, each over what there is, added up; None where it is illegal."""

    @property
    def reason(self) -> str:
        return self.reasons[0]


T = TypeVar("T")
Wanted = Mapping[str, ComponentStrategy]
Attempt = Callable[[Wanted], Evaluated | Refused]
Rows = list[tuple[str, Refused]]
_OFFLOADS = (("none",), ("cpu", "cpu_params"))


def search(config: RunConfig, pinned: Wanted, attempt: Attempt) -> tuple[Wanted, tuple[Candidate, ...]]:
    """(what the winner wants, the candidates: the winner, the next best, and the nearest refusals).

    Raises:
        PlanError: nothing legal fits; the reasons, the commonest first, or the nearest candidates' figures.
    """
    refused: Rows = []
    tried: set[tuple[ComponentStrategy, ...]] = set()
    largest = config.training.micro_batch or 1
    for offloads, most in product(_OFFLOADS, reversed(shapes.divisors(largest))):
        fitting: list[tuple[float, float, Evaluated, Wanted]] = []
        for wanted in _space(config, pinned, offloads, most):
            if tuple(wanted.values()) in tried:
                continue
            tried.add(tuple(wanted.values()))
            found = attempt(wanted)
            if isinstance(found, Refused):
                refused.append((_describe(config, wanted), found))
            else:
                fitting.append((found.time.step_s, found.peak_gib, found, wanted))
        if fitting:
            fitting.sort(key=lambda row: row[:2])
            return fitting[0][3], (*_ranked(fitting), *_refused(refused))
    raise PlanError(_nothing(config, refused))


def _space(config: RunConfig, pinned: Wanted, offloads: tuple[str, ...], most: int) -> Iterator[Wanted]:
    """Every layout to try; what is pinned alone where no layout goes with it, so that the reason is found."""
    trunk, empty = config.model.trunk, True
    want, component, world = pinned[trunk], config.model.components[trunk], config.cluster.world_size
    tps = [n for n in shapes.divisors(tensor_domain(config.cluster)) if shapes.legal_tp(component, n) is None]
    pps = [n for n in shapes.divisors(world) if want.layers_per_stage or shapes.layers(component) % n == 0]
    for tp, pp, zero, recompute, offload in product(
        _choices(want.tp, tps), _choices(want.pp, pps), _choices(want.zero, [0, 1, 2, 3]),
        _choices(want.recompute, ["none", "selective", "full"]), _choices(want.offload, list(offloads)),
    ):  # fmt: skip
        if world % (tp * pp) or (want.zero is None and not _sensible(zero, offload, world > tp * pp)):
            continue
        empty = False
        degrees = {"tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "offload": offload}
        yield _around(config, pinned, want.model_copy(update=degrees), most)
    if empty:
        yield pinned


def _sensible(zero: int, offload: str, replicated: bool) -> bool:
    """Whether the stage is worth a try: replicas shard something, and offload has what it moves."""
    return zero >= {"none": int(replicated), "cpu": 1, "nvme": 1}.get(offload, 3)


def _around(config: RunConfig, pinned: Wanted, chosen: ComponentStrategy, most: int) -> Wanted:
    """The trunk as chosen, the others beside it, each with a micro-batch that divides."""
    trunk, fused = config.model.trunk, config.model.fused(config.model.trunk)
    every = {
        name: chosen if name == trunk else _beside(pinned[name], chosen, fused=name in fused)
        for name in pinned
    }
    return {name: _with_micro_batch(config, name, want, most) for name, want in every.items()}


def _with_micro_batch(config: RunConfig, name: str, want: ComponentStrategy, most: int) -> ComponentStrategy:
    given = config.training.micro_batch
    if want.micro_batch is not None or given is None:
        return want
    ranks = config.cluster.world_size - (want.rank_offset or 0)
    dp = want.dp or ranks // ((want.tp or 1) * (want.pp or 1) * (want.cp or 1))
    size = (whole_micro_batch(config, name, dp, most) if dp else None) or 1
    return want if size == given else want.model_copy(update={"micro_batch": size})


def _choices(pinned: T | None, all_of_them: list[T]) -> list[T]:
    return all_of_them if pinned is None else [pinned]


def _beside(want: ComponentStrategy, trunk: ComponentStrategy, *, fused: bool) -> ComponentStrategy:
    uniform = fused or (trunk.tp == 1 and trunk.pp == 1)
    follow = {
        "tp": trunk.tp if fused else 1,
        "pp": trunk.pp if fused else 1,
        "zero": trunk.zero if uniform else 2,
        "recompute": trunk.recompute,
        "offload": trunk.offload if uniform else "none",
    }
    return want.model_copy(update={k: v for k, v in follow.items() if getattr(want, k) is None})


def _describe(config: RunConfig, wanted: Wanted) -> str:
    trunk = wanted[config.model.trunk]
    words = f"TP{trunk.tp or 1} PP{trunk.pp or 1} ZeRO-{trunk.zero or 0} recompute {trunk.recompute or 'none'}"
    words += "" if trunk.offload in (None, "none") else f" offload {trunk.offload}"
    words += "" if trunk.micro_batch is None else f" micro-batch {trunk.micro_batch}"
    return f"{config.model.trunk} {words}"


def _ranked(fitting: list[tuple[float, float, Evaluated, Wanted]]) -> list[Candidate]:
    best = fitting[0][0]
    return [
        Candidate(found.describe(), peak, step, "chosen" if i == 0 else f"slower: x{step / best:.2f}")
        for i, (step, peak, found, _) in enumerate(fitting[:8])
    ]


def _refused(refused: Rows) -> list[Candidate]:
    """The refusals for memory, those that lack least first; others where there are none."""
    rows = _smallest(refused) or refused[:4]
    return [Candidate(layout, 0.0, 0.0, f"refused: {row.reason}") for layout, row in rows]


def _smallest(refused: Rows) -> Rows:
    """The refusals for memory, those that lack least first."""
    for_memory = [row for row in refused if row[1].excess is not None]
    return sorted(for_memory, key=lambda row: row[1].excess or 0.0)[:4]


def _nothing(config: RunConfig, refused: Rows) -> str:
    """What memory refuses, and the commonest other reason; the one that refuses more comes first."""
    cluster, kinds = describe(config.cluster), _kinds([row for _, row in refused if row.excess is None])
    legal = sum(row.excess is not None for _, row in refused)
    if len(refused) == 1 and not legal:
        faults = "\n".join(refused[0][1].reasons)
        return f"strategy=auto: no layout on {cluster} goes with what is set.\n{faults}"
    reasons = [(legal, _memory_reason(refused))] if legal else []
    reasons += [(len(rows), f"{len(rows)} are illegal, such as: {rows[0].reason}") for rows in kinds[:1]]
    shown = "\n".join(text for _, text in sorted(reasons, key=lambda reason: -reason[0]))
    return f"strategy=auto: none of {len(refused)} layouts is legal and fits on {cluster}.\n{shown}"


def _kinds(refused: list[Refused]) -> list[list[Refused]]:
    """Refusals with the same key at fault, the commonest first."""
    kinds: dict[str, list[Refused]] = {}
    for row in refused:
        kinds.setdefault(re.sub(r"\d+", "", row.reason.split(":")[0]), []).append(row)
    return sorted(kinds.values(), key=lambda rows: -len(rows))


def _memory_reason(refused: Rows) -> str:
    count = sum(row.excess is not None for _, row in refused)
    nearest = "".join(f"\n  {layout}: {row.reason}" for layout, row in _smallest(refused))
    return (
        f"{count} need too much memory; nearest:{nearest}\n"
        "Use more GPUs, a smaller training.seq_len, or GPUs with more memory."
    )
