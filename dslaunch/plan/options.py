"""Layouts of components that share one, with what the ledgers say of them: the pieces that a search puts together.

Three things keep the ledgers' calls few, and none changes a figure. Stages whose layers are alike have one time,
and the first of them the most memory, as micro-batches in flight do not grow along a pipeline. A layout takes
no less memory with a larger micro-batch of several, and least with most recompute: where that does not fit,
nothing of its family does, and the micro-batches after the first that does not fit are not tried. And what a
bound shows to be too slow, whatever memory it takes, is neither weighed nor timed. Where the backward pass is
split, what waits for its weights' gradients grows along the pipeline, and had been recomputed: each stage is
weighed, with each recompute.
tests/real/test_search.py holds the ledgers to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.hardware.efficiency import Tables
from dslaunch.model.blocks import blocks
from dslaunch.model.params import trained_layers
from dslaunch.model.tokens import Reads
from dslaunch.plan import space
from dslaunch.plan.bound import least_s, undivided_s
from dslaunch.plan.case import Case, cases
from dslaunch.plan.front import named
from dslaunch.plan.memory import host_gib_per_rank, stage_memory, uses_host
from dslaunch.plan.profile import Profile, fullest_node_gib, profile
from dslaunch.plan.schedules import SPLIT, put_off
from dslaunch.plan.space import Family, Group, scheduled
from dslaunch.plan.time import Known, span_s, step_time
from dslaunch.planfile import MemoryGib
from dslaunch.schema.components import Component, Mlp, Other
from dslaunch.schema.config import RunConfig


@dataclass(frozen=True)
class Setting:
    """What all options of one search pass have in common."""

    config: RunConfig
    engine: Engine
    tables: Tables
    dtype: str
    """That gradients are accumulated in."""
    accumulates: bool | None
    """Whether `dtype` is that for several micro-batches a step or for one; None: for both."""
    limit_gib: float
    """GPU memory for the components, the overhead taken off."""
    overhead_gib: float
    """What a GPU holds beside the components."""
    known: Known = field(default_factory=dict, compare=False)
    undivided: dict[object, float] = field(default_factory=dict, compare=False)
    """Seconds of a micro-batch on all stages, by what they depend on."""

    @property
    def who(self) -> str:
        """The engine, and who shards where it is not the engine."""
        strategy = self.config.strategy
        return named(self.engine.name, strategy.sharding, strategy.shard)


@dataclass(frozen=True, eq=False)
class Option:
    """A layout whose memory fits on ranks of its own."""

    cases: Mapping[str, Case]
    ranks: Profile
    """Empty where the group is the whole model, which `peak_gib` alone decides."""
    peak_gib: float
    seconds: float = 0.0
    """Of a step."""

    @property
    def layouts(self) -> dict[str, Layout]:
        return {name: case.layout for name, case in self.cases.items()}


@dataclass(frozen=True)
class Misfit:
    """Micro-batches of a family with which nothing fits."""

    family: Family
    micro_batch: int
    """The smallest of them."""
    reason: str
    """Its option with least memory, in figures."""
    over: float
    """What it needs by what there is."""
    layouts: int
    """How many it stands for."""
    at_least_s: Callable[[], float] = field(compare=False)
    """That a step takes with `micro_batch`; few are asked."""

    def describe(self) -> str:
        """In words, such as `TP8 PP4 DP2 ZeRO-1 micro-batch 1`."""
        return f"{self.family.describe()} micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Passed:
    """What comes of a family beside its options: some of it fits, or is too slow to be weighed."""


PASSED = Passed()


def fitting(
    setting: Setting,
    group: Group,
    family: Family,
    promising: Callable[[float, float], bool],
    *,
    whole_model: bool = False,
) -> Iterator[Option | Misfit | Passed]:
    """The options of a family that fit, for each micro-batch the one that keeps most first; or what does not fit.

    Args:
        promising: whether an option that takes at least so many GiB and seconds is of use; others may be left out.
    """
    config = scheduled(setting.config, family.schedule)
    sizes = [
        size
        for size in space.batches(config, group, family)
        if setting.accumulates is None or _goes_with(setting.accumulates, size[1], whole_model=whole_model)
    ]
    # Gradients of one micro-batch alone need not stand while it runs forward: that size is judged by itself.
    for run in ([size for size in sizes if size[1] > 1], [size for size in sizes if size[1] == 1]):
        if run:
            yield from _of_sizes(setting, group, family, run, promising, whole_model=whole_model)


def _of_sizes(
    setting: Setting,
    group: Group,
    family: Family,
    sizes: Sequence[tuple[int, int]],
    promising: Callable[[float, float], bool],
    *,
    whole_model: bool,
) -> Iterator[Option | Misfit | Passed]:
    """`fitting` for batches in ascending order, of which a larger one never takes less memory."""
    config, keeps = scheduled(setting.config, family.schedule), space.recomputes(group)
    weighed = keeps if family.schedule in SPLIT else keeps[-1:]

    def laid(recompute: str, size: tuple[int, int]) -> dict[str, Case]:
        layouts = space.layouts(config, group, family, recompute, size)
        return cases(config, setting.engine, layouts, setting.dtype)

    peak = 0.0
    for i, size in enumerate(sizes):
        # To weigh is cheaper than to find a bound: what does not fit needs none.
        known = _undivided_key(group, family, size) in setting.undivided
        if known and not promising(peak, _least_s(setting, group, family, size)):
            continue
        least = _least_memory(setting, [laid(keep, size) for keep in weighed], whole_model=whole_model)
        if not isinstance(least, Option):
            if i:
                yield PASSED
            bound = partial(_least_s, setting, group, family, size)
            yield Misfit(family, size[0], *least, layouts=(len(sizes) - i) * len(keeps), at_least_s=bound)
            return
        peak = least.peak_gib
        if not promising(peak, _least_s(setting, group, family, size)):
            continue
        # Recompute only adds work: what runs with least of it bounds what runs with more.
        seconds = _seconds(setting, laid(keeps[0], size))
        if not promising(peak, seconds):
            continue
        for recompute in keeps:
            every = laid(recompute, size)
            found = _weighed(setting, every, whole_model=whole_model)
            if isinstance(found, Option) and promising(found.peak_gib, seconds):
                own = seconds if recompute == keeps[0] else _seconds(setting, every)
                yield replace(found, seconds=own)
    yield PASSED


def _least_memory(
    setting: Setting, ways: Sequence[Mapping[str, Case]], *, whole_model: bool
) -> Option | tuple[str, float]:
    """Of options alike but for their recompute the one with least memory; or what the nearest lacks."""
    found = [_weighed(setting, every, whole_model=whole_model) for every in ways]
    if options := [each for each in found if isinstance(each, Option)]:
        return min(options, key=lambda option: option.peak_gib)
    return min((each for each in found if not isinstance(each, Option)), key=lambda lack: lack[1])


def _undivided_key(group: Group, family: Family, size: tuple[int, int]) -> object:
    return tuple(group.pins), family.tp, family.cp, family.ep, family.etp, size[0]


def _least_s(setting: Setting, group: Group, family: Family, size: tuple[int, int]) -> float:
    """Seconds of a step at least, whatever recompute."""
    config, key = setting.config, _undivided_key(group, family, size)
    if (undivided := setting.undivided.get(key)) is None:
        laid = space.layouts(config, group, family, "none", size)
        every = cases(config, setting.engine, laid, setting.dtype).values()
        undivided = sum(undivided_s(case, setting.tables, setting.known) for case in every)
        setting.undivided[key] = undivided
    return least_s(undivided, family.pp, family.vpp, size[1], family.schedule)


def _seconds(setting: Setting, every: Mapping[str, Case]) -> float:
    """Seconds that the components take of a step on their ranks, where they share them."""
    if len(every) > 1 and any(case.is_trunk for case in every.values()):
        return step_time(every, setting.tables, setting.known).step_s
    return sum(span_s(case, setting.tables, setting.known) for case in every.values())


def kinds(case: Case) -> tuple[int, ...]:
    """A number for each stage, the same for stages with the same layers, in one order, at the same end."""
    return _kinds(case.component, case.reads, case.lowest_layer, case.layout.layers_per_stage)


@lru_cache(maxsize=4096)
def _kinds(
    component: Component, reads: Reads, lowest: int, layers_per_stage: tuple[int, ...]
) -> tuple[int, ...]:
    alike, last = layer_kinds(component, reads, lowest), len(layers_per_stage) - 1
    first, found, numbers = 0, list[int](), dict[object, int]()
    for stage, number in enumerate(layers_per_stage):
        kind = (alike[first : first + number], stage == 0, stage == last)
        found.append(numbers.setdefault(kind, len(numbers)))
        first += number
    return tuple(found)


@lru_cache(maxsize=512)
def layer_kinds(component: Component, reads: Reads, lowest: int) -> tuple[int, ...]:
    """A number for each layer, the same for layers that the ledgers cannot tell apart."""
    if isinstance(component, Mlp | Other):
        return (0,)
    trained, numbers = trained_layers(component), dict[object, int]()
    return tuple(
        numbers.setdefault((block, reads.cross_at(i), i in trained, i >= lowest), len(numbers))
        for i, block in enumerate(blocks(component))
    )


def _goes_with(accumulates: bool, number: int, *, whole_model: bool) -> bool:
    """Whether so many micro-batches go with the type: where one component accumulates, others need not."""
    return number == 1 if not accumulates else number > 1 or not whole_model


def _weighed(setting: Setting, every: Mapping[str, Case], *, whole_model: bool) -> Option | tuple[str, float]:
    """The option, or what it lacks in figures, and its need by what there is."""
    layout = next(iter(every.values())).layout
    moved = any(uses_host(case) for case in every.values())
    keys: list[tuple[object, ...]] = list(zip(*(kinds(case) for case in every.values()), strict=True))
    schedule = next(iter(every.values())).config.training.schedule
    if not whole_model or moved or schedule in SPLIT:
        keys = [(*key, *_held(every, stage)) for stage, key in enumerate(keys)]
    known: dict[object, float] = {}
    factor = next(iter(every.values())).correction(setting.tables).memory
    for stage, key in enumerate(keys):
        if key in known:
            continue
        rows = {name: stage_memory(case, stage, factor) for name, case in every.items()}
        known[key] = sum(row.total for row in rows.values())
        if known[key] > setting.limit_gib:
            return _too_much(setting, rows, stage if layout.pp > 1 else None)
    if whole_model and not moved:
        return Option(every, (), max(known.values()))
    return _with_host(setting, every, [known[key] for key in keys], moved=moved)


def _held(every: Mapping[str, Case], stage: int) -> Iterator[float]:
    """What the memory of stages with layers alike depends on."""
    for case in every.values():
        yield case.in_flight(stage)
        yield put_off(case.config.training.schedule or "1f1b", stage, case.layout.num_microbatches)


def _with_host(
    setting: Setting, every: Mapping[str, Case], totals: Sequence[float], *, moved: bool
) -> Option | tuple[str, float]:
    """The option on all its ranks, where the hosts' memory holds it as well."""
    layout, cluster = next(iter(every.values())).layout, setting.config.cluster
    host = [
        sum(host_gib_per_rank(case, stage) if moved else 0.0 for case in every.values())
        for stage in range(layout.pp)
    ]
    ranks = profile(layout, totals, host)
    node = fullest_node_gib(ranks, cluster.slots) if moved else 0.0
    if node > cluster.node.host_memory_gib:
        have = cluster.node.host_memory_gib
        return f"{node:.0f} of {have:.0f} GiB of a node's host memory", node / have
    return Option(every, ranks, max(totals))


def _too_much(setting: Setting, rows: Mapping[str, MemoryGib], stage: int | None) -> tuple[str, float]:
    """Such as `83.1 of 76.0 GiB on stage 0: activations 41.2`; the first figure has the overhead in it."""
    gib = sum(row.total for row in rows.values())
    terms = {
        (f"{name} " if len(rows) > 1 else "") + term: value
        for name, row in rows.items()
        for term, value in vars(row).items()
        if term != "total"
    }
    shown = ", ".join(f"{term} {value:.1f}" for term, value in sorted(terms.items(), key=lambda t: -t[1])[:2])
    where = "" if stage is None else f" on stage {stage}"
    over = setting.overhead_gib
    need, have = gib + over, setting.limit_gib + over
    digits = next(n for n in range(1, 17) if n == 16 or round(need, n) > round(have, n))
    return f"{need:.{digits}f} of {have:.{digits}f} GiB{where}: {shown}", need / have
