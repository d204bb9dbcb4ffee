"""Where the components' grids stand in the world: they cover it, and two of them share ranks or do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from dslaunch.engines.layout import Layout
from dslaunch.schema.config import RunConfig


def spread_faults(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """Ranks that no component gives work, and grids that share a part of their ranks only."""
    return [*_gaps(config, layouts), *_partial_overlaps(layouts)]


def one_grid(config: RunConfig, layouts: Mapping[str, Layout], engine: str) -> list[str]:
    """What stands against an engine that takes one layout for the whole model: it runs on all ranks."""
    world = config.cluster.world_size
    return [
        f"strategy.{name} is on {_span(layout)}; {engine} takes one layout for the whole model, on all {world} "
        f"ranks: leave strategy.{name}.rank_offset out"
        for name, layout in layouts.items()
        if (layout.rank_offset, layout.ranks) != (0, world)
    ]


def stretches(layouts: Mapping[str, Layout]) -> Iterator[tuple[range, list[str]]]:
    """Runs of ranks that hold the same components, in rank order, and which; those that hold none are left out."""
    edges = {edge for layout in layouts.values() for edge in (layout.rank_offset, _end(layout))}
    for first, end in itertools.pairwise(sorted(edges)):
        held = [name for name, each in layouts.items() if each.rank_offset <= first and end <= _end(each)]
        if held:
            yield range(first, end), held


def _gaps(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    world, covered, gaps = config.cluster.world_size, 0, []
    for ranks, _ in stretches(layouts):
        gaps += [range(covered, ranks.start)] if ranks.start > covered else []
        covered = ranks.stop
    gaps += [range(covered, world)] if covered < world else []
    if not gaps:
        return []
    idle = sum(len(gap) for gap in gaps)
    shown = ", ".join(f"strategy.{name} is on {_span(layout)}" for name, layout in layouts.items())
    return [
        f"{shown}: {' and '.join(map(_named, gaps))}, {idle} of {world}, are left without work; change "
        "rank_offset or dp so that the components together cover all"
    ]


def _partial_overlaps(layouts: Mapping[str, Layout]) -> list[str]:
    """Two grids that overlap in part would have stages whose replicas wait for different components."""
    faults = []
    for one, other in itertools.combinations(layouts, 2):
        grids = sorted((layouts[one], layouts[other]), key=lambda layout: layout.rank_offset)
        shared = range(grids[1].rank_offset, min(_end(grids[0]), _end(grids[1])))
        if shared and len(shared) < min(layout.ranks for layout in grids):
            faults.append(
                f"strategy.{one} is on {_span(layouts[one])}, strategy.{other} on {_span(layouts[other])}: they "
                f"share {_named(shared)} only. Two components are on ranks of their own, or all ranks of one "
                "are among the other's: samples pass between whole grids; change rank_offset or dp"
            )
    return faults


def _end(layout: Layout) -> int:
    return layout.rank_offset + layout.ranks


def _span(layout: Layout) -> str:
    return _named(range(layout.rank_offset, _end(layout)))


def _named(ranks: range) -> str:
    return f"ranks {ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"rank {ranks.start}"
