"""Components with a layout each: arrangements on the ranks, and the pieces that none beats put together.

Either all components are on all ranks and take turns, or those beside the trunk are on the first ranks and the
trunk (with what shares its attention) on the others, one of the two on a whole fraction of the cluster, cut
between nodes where there are several. A piece is left out where another takes no more memory on any rank, and no
more time: with any others it is no better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.model.shapes import divisors
from dslaunch.plan import space
from dslaunch.plan.case import cases
from dslaunch.plan.engine_choice import engine_faults
from dslaunch.plan.grids import spread_faults
from dslaunch.plan.notes import Notes
from dslaunch.plan.options import Misfit, Passed, Setting, fitting
from dslaunch.plan.profile import Profile, added, fullest, fullest_node_gib
from dslaunch.plan.space import Family, Group, scheduled
from dslaunch.plan.step_flops import model_flops
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

Wanted = Mapping[str, ComponentStrategy]


@dataclass(frozen=True, eq=False)
class Piece:
    """Layouts of some components, with what they take on each rank."""

    layouts: dict[str, Layout]
    schedule: str
    ranks: Profile
    peak_gib: float
    step_s: float
    moved: bool
    """Whether something is in host memory."""

    @property
    def samples(self) -> int:
        """Samples that the first component takes at a time, on all its ranks."""
        layout = next(iter(self.layouts.values()))
        return layout.micro_batch * layout.dp

    def with_(self, other: Piece) -> Piece:
        """Both together."""
        ranks = added([self.ranks, other.ranks])
        return Piece(
            {**self.layouts, **other.layouts},
            self.schedule,
            ranks,
            fullest(ranks).gib,
            max(held.seconds for held in ranks),
            self.moved or other.moved,
        )

    def least(self, other: Piece) -> tuple[float, float]:
        """(memory, time) that both together take at least."""
        same = (self.ranks[0].first, self.ranks[-1].end) == (other.ranks[0].first, other.ranks[-1].end)
        step = self.step_s + other.step_s if same else max(self.step_s, other.step_s)
        return max(self.peak_gib, other.peak_gib), step


def groups(config: RunConfig, engine: Engine) -> list[list[str]]:
    """Names that share one layout, the trunk's first."""
    model = config.model
    every = list(model.components)
    trunk = [model.trunk, *(n for n in every if n in model.fused(model.trunk) and n != model.trunk)]
    if not engine.per_component:
        return [[model.trunk, *(n for n in every if n != model.trunk)]]
    left = [name for name in every if name not in trunk]
    if engine.towers_apart:
        return [trunk, left] if left else [trunk]
    found = [trunk]
    while left:
        found.append([name for name in left if name in model.fused(left[0])])
        left = [name for name in left if name not in found[-1]]
    return found


def arrangements(config: RunConfig, engine: Engine, pinned: Wanted) -> Iterator[list[Group]]:
    """Where the groups stand, the trunk's first: on all ranks, and then apart."""
    names, world = groups(config, engine), config.cluster.world_size
    if any(want.rank_offset is not None for want in pinned.values()):
        yield from _pinned(config, engine, pinned, names)
        return
    shared = [_group(pinned, each, i == 0, 0, world) for i, each in enumerate(names)]
    if not (engine.towers_apart and len(names) > 1):
        yield shared
    if len(names) == 1 or not engine.per_component:
        return
    trunk, sides = shared[0], shared[1:]
    of_sides = set[int].intersection(*(space.reachable(config, engine, side) for side in sides))
    of_trunk = space.reachable(config, engine, trunk)
    step = config.cluster.slots if config.cluster.node_count > 1 else 1
    cuts = {cut for part in divisors(world) for cut in (part, world - part) if cut % step == 0}
    for cut in sorted(cut for cut in cuts & of_sides if world - cut in of_trunk):
        yield [
            _group(pinned, each, i == 0, *((cut, world - cut) if i == 0 else (0, cut)))
            for i, each in enumerate(names)
        ]


def pieces(
    setting: Setting,
    group: Group,
    offloads: Sequence[str],
    promising: Callable[[float, float], bool],
    notes: Notes,
    others: Sequence[Group] = (),
) -> list[Piece]:
    """What none beats of the group's options that the engine executes, the fastest first.

    Args:
        others: groups that the engine judges together with this one.
    """
    found: list[Piece] = []
    who = f"{setting.who}: {'+'.join(group.pins)}"
    comparable = not setting.engine.towers_apart
    for family in space.families(setting.config, setting.engine, group, offloads):
        layouts = len(space.batches(setting.config, group, family)) * len(space.recomputes(group))
        if against := _family_faults(setting, group, family, others, offloads):
            notes.refuse(setting.engine.name, against, layouts)
            continue
        notes.considered += layouts
        if not _takes_type(setting, family):
            continue
        single = [(p.peak_gib, p.step_s) for p in found if len(p.ranks) == 1]

        def useful(gib: float, seconds: float, known: list[tuple[float, float]] = single) -> bool:
            return promising(gib, seconds) and not any(g <= gib and s <= seconds for g, s in known)

        for option in fitting(setting, group, family, useful if comparable and family.pp == 1 else promising):
            if isinstance(option, Misfit):
                notes.misfits.append((who, option))
                continue
            if isinstance(option, Passed):
                if group.trunk:
                    notes.passed.add(setting.engine.name)
                continue
            ranks = tuple(replace(held, seconds=option.seconds) for held in option.ranks)
            moved = family.offload != "none" or setting.config.checkpoint.in_background
            found.append(Piece(option.layouts, family.schedule, ranks, option.peak_gib, option.seconds, moved))
    return unbeaten(found, by_samples=setting.engine.towers_apart)


def ideal_s(setting: Setting, group: Group) -> float:
    """Seconds of a step that the group's model FLOPs take at its dense peak: none is predicted faster.

    No engine's plan computes in fp4. Infinite where what is pinned leaves the group no layout.
    """
    gpu = setting.config.cluster.gpu
    chosen = _first(setting, group, ("none", "cpu", "cpu_params"), None)
    if chosen is None:
        return math.inf
    laid = space.layouts(setting.config, group, chosen[0], "none", chosen[1])
    every = cases(setting.config, setting.engine, laid, setting.dtype)
    rate = max(peak for kind, peak in gpu.peak_tflops.items() if kind != "fp4") * 1e12
    faster = min(1.0, next(iter(every.values())).correction(setting.tables).time)
    return faster * sum(model_flops(case) for case in every.values()) / (group.ranks * rate)


def merged(setting: Setting, parts: Sequence[list[Piece]]) -> list[Piece]:
    """Every combination of one piece of each part that fits and that none beats."""
    found = parts[0]
    for part in parts[1:]:
        pairs = (one.with_(other) for one, other in itertools.product(found, part))
        found = unbeaten(pair for pair in pairs if pair.peak_gib <= setting.limit_gib)
    return found


def unbeaten(found: Iterable[Piece], *, by_samples: bool = False) -> list[Piece]:
    """The pieces that none of the same stretches beats, the fastest first, the earlier of equal ones.

    Args:
        by_samples: compare only pieces that take the same number of samples at a time.
    """
    kept: dict[tuple[int, ...], list[Piece]] = {}
    for piece in sorted(found, key=lambda piece: (piece.step_s, piece.peak_gib)):
        same = kept.setdefault((by_samples and piece.samples, *(held.end for held in piece.ranks)), [])
        if not any(_beats(other.ranks, piece.ranks) for other in same):
            same.append(piece)
    return sorted((piece for same in kept.values() for piece in same), key=lambda piece: piece.step_s)


def go_together(engine: Engine, trunk: Piece, side: Piece) -> bool:
    """Whether both take the same samples at a time, where the engine wants it."""
    return not engine.towers_apart or trunk.samples == side.samples


def faults(setting: Setting, arranged: Sequence[Group], offloads: Sequence[str]) -> list[str]:
    """What stands against an arrangement, whatever the layouts: where the groups stand."""
    laid: dict[str, Layout] = {}
    for group in arranged:
        if (first := _first(setting, group, offloads, None)) is None:
            return []
        laid |= space.layouts(setting.config, group, first[0], "none", first[1])
    return spread_faults(setting.config, {name: laid[name] for name in setting.config.model.components})


def _family_faults(
    setting: Setting, group: Group, family: Family, others: Sequence[Group], offloads: Sequence[str]
) -> list[str]:
    """What the engine has against a family of one group, whatever recompute and micro-batch.

    Where it judges groups together, a size of the family is taken with which each of the others has a layout for
    the same samples.
    """
    config = scheduled(setting.config, family.schedule)
    for size in space.batches(config, group, family):
        beside = [(other, _first(setting, other, offloads, size[0] * family.dp)) for other in others]
        laid = space.layouts(config, group, family, "none", size)
        for other, first in beside:
            if first is not None:
                laid |= space.layouts(config, other, first[0], "none", first[1])
        if all(first is not None for _, first in beside):
            return engine_faults(config, laid, setting.engine.name)
    return []


def _takes_type(setting: Setting, family: Family) -> bool:
    """Whether gradients of a family can be of the type that all of the model's are accumulated in."""
    precision = setting.config.training.precision
    return setting.dtype in (precision, *setting.engine.grad_accum_choices(precision, family.zero))


def _first(
    setting: Setting, group: Group, offloads: Sequence[str], samples: int | None
) -> tuple[Family, tuple[int, int]] | None:
    """The first family and batch of a group that take so many samples at a time."""
    for family in space.families(setting.config, setting.engine, group, offloads):
        for size in space.batches(setting.config, group, family):
            if samples in (None, size[0] * family.dp):
                return family, size
    return None


def fits_host(setting: Setting, piece: Piece) -> bool:
    """Whether the fullest node's memory holds what is moved there."""
    cluster = setting.config.cluster
    return not piece.moved or fullest_node_gib(piece.ranks, cluster.slots) <= cluster.node.host_memory_gib


def _beats(one: Profile, other: Profile) -> bool:
    return all(
        a.gib <= b.gib and a.host_gib <= b.host_gib and a.seconds <= b.seconds
        for a, b in zip(one, other, strict=True)
    )


def _group(pinned: Wanted, names: Sequence[str], trunk: bool, offset: int, ranks: int) -> Group:
    return Group({name: pinned[name] for name in names}, trunk, offset, ranks)


def _pinned(
    config: RunConfig, engine: Engine, pinned: Wanted, names: list[list[str]]
) -> Iterator[list[Group]]:
    """Each group from its pinned rank on, over the ranks that its pinned dp takes, or all that are left."""
    world, choices = config.cluster.world_size, []
    for i, each in enumerate(names):
        offset = next((o for name in each if (o := pinned[name].rank_offset) is not None), 0)
        group = _group(pinned, each, i == 0, offset, world - offset)
        sizes = (
            [world - offset] if group.pinned("dp") is None else sorted(space.reachable(config, engine, group))
        )
        choices.append([_group(pinned, each, i == 0, offset, size) for size in sizes])
    yield from (list(chosen) for chosen in itertools.product(*choices))
