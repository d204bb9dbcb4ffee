"""What ranks hold and do, as stretches of neighbours that are alike: as many as there are stages, not GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.engines.layout import Layout
from dslaunch.plan import memory


@dataclass(frozen=True)
class Held:
    """Each rank from `first` to the one before `end`."""

    first: int
    end: int
    gib: float
    """On the GPU, the overhead not counted."""
    host_gib: float
    """In host memory, beside what each process takes."""
    seconds: float = 0.0
    """What it is busy in a step: the components on a rank take turns."""


Profile = tuple[Held, ...]
"""In rank order."""


def profile(layout: Layout, gib: Sequence[float], host_gib: Sequence[float], seconds: float = 0.0) -> Profile:
    """One component's ranks; `gib` and `host_gib` are those of a rank, by stage."""
    each, first = layout.ranks // layout.pp, layout.rank_offset
    return tuple(
        Held(first + stage * each, first + (stage + 1) * each, gib[stage], host_gib[stage], seconds)
        for stage in range(layout.pp)
    )


def added(profiles: Sequence[Profile]) -> Profile:
    """The sum over components, on the ranks that at least one of them has."""
    spans = {(part[0].first, part[-1].end) for part in profiles}
    staged = max(profiles, key=len)
    if len(spans) == 1 and all(len(part) == 1 or part is staged for part in profiles):
        return tuple(_sum(s.first, s.end, [s if p is staged else p[0] for p in profiles]) for s in staged)
    edges = sorted({edge for part in profiles for held in part for edge in (held.first, held.end)})
    found = []
    for first, end in itertools.pairwise(edges):
        here = [held for part in profiles for held in part if held.first <= first and end <= held.end]
        if here:
            found.append(_sum(first, end, here))
    return tuple(found)


def _sum(first: int, end: int, parts: Sequence[Held]) -> Held:
    gib, host, seconds = 0.0, 0.0, 0.0
    for held in parts:
        gib, host, seconds = gib + held.gib, host + held.host_gib, seconds + held.seconds
    return Held(first, end, gib, host, seconds)


def fullest(ranks: Profile) -> Held:
    """The stretch with most on a GPU; the first of several."""
    return max(ranks, key=lambda held: (held.gib, -held.first))


def fullest_node_gib(ranks: Profile, slots: int) -> float:
    """Host memory of the fullest node, each process's own in it."""
    return memory.host_gib_per_node(_of_ranks(ranks, slots), slots)


def most_on_a_node_gib(ranks: Profile, slots: int) -> float:
    """The most that ranks of one node have in `host_gib`."""
    nodes: dict[int, float] = {}
    for rank, gib in _of_ranks(ranks, slots).items():
        nodes[rank // slots] = nodes.get(rank // slots, 0.0) + gib
    return max(nodes.values())


def _of_ranks(ranks: Profile, slots: int) -> dict[int, float]:
    """By rank: of each stretch those of a node within it, and of all nodes at its edges."""
    nodes = {edge // slots for held in ranks for edge in (held.first, held.end - 1, held.first + slots)}
    return {
        rank: held.host_gib
        for held in ranks
        for node in nodes
        for rank in range(max(held.first, node * slots), min(held.end, (node + 1) * slots))
    }
