"""strategy=auto: every legal layout of every component is covered, and the best by the goal is taken.

What is pinned stays. Engines are searched one after the other into one front; what cannot change it is not
computed. Offload is tried only where nothing fits without it, on any size of the cluster that the goal allows.
Unpinned micro-batches are chosen freely. The type that gradients are accumulated in is the engine's own choice:
it is never narrowed to save memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.hardware.efficiency import Tables
from dslaunch.plan import goals, joint, space
from dslaunch.plan.case import cases
from dslaunch.plan.engine_choice import candidates, engine_faults, grad_accum, version_faults
from dslaunch.plan.evaluate import memory_band
from dslaunch.plan.findings import limit_gib
from dslaunch.plan.front import Front, Scored
from dslaunch.plan.joint import Piece, Wanted
from dslaunch.plan.memory import overhead_gib
from dslaunch.plan.notes import Notes
from dslaunch.plan.options import Misfit, Passed, Setting, fitting
from dslaunch.plan.sharding import sharded, variants
from dslaunch.plan.space import Family, Group, scheduled
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

_OFFLOADS = (("none",), ("none", "cpu", "cpu_params"))
_IN_BAND = "nothing fits by the prediction itself; the least memory of what its error band lets fit"


@dataclass(frozen=True)
class Found:
    """What a search comes to."""

    config: RunConfig
    """On the size of the cluster, and with the schedule, that were chosen."""
    chosen: Scored
    front: Front
    """Of the chosen size."""
    notes: Notes
    goal: str
    """In words."""

    @property
    def wanted(self) -> Wanted:
        return {name: strategy_of(layout) for name, layout in self.chosen.layouts.items()}


def search(config: RunConfig, pinned: Wanted, tables: Tables, *, in_band: bool = False) -> Found | Notes:
    """The best by the goal, or what stands against every layout.

    Args:
        in_band: whether a layout may need more memory than there is, as far as the ledger's error band goes; then
            the one that needs least is the best.

    Raises:
        PlanError: plans fit, and none of them meets the deadline.
    """
    notes, given = Notes(), config.cluster.node_count
    for offloads in _OFFLOADS:
        fronts: dict[int, Front] = {}
        best: dict[int, Scored] = {}
        for nodes in goals.sizes(config):
            sized, notes = goals.resized(config, nodes), Notes()
            fronts[nodes] = front_of(sized, pinned, tables, offloads, notes, in_band=in_band)
            if found := goals.best_of(sized, fronts[nodes]):
                best[nodes] = found
                if config.goal.name != "cost":
                    break
        taken = goals.decided(config, best)
        if taken is not None:
            chosen = best[taken]
            sized = settled(goals.resized(config, taken), chosen)
            goal = f"{config.goal.name}: {_IN_BAND}" if in_band else goals.words(config, taken, given)
            return Found(sized, chosen, fronts[taken], notes, goal)
        if fast := [front.best[0] for front in fronts.values() if front.best]:
            raise goals.too_slow(config, min(fast, key=lambda each: each.step_s))
    return notes


def front_of(
    config: RunConfig,
    pinned: Wanted,
    tables: Tables,
    offloads: Sequence[str],
    notes: Notes,
    *,
    in_band: bool = False,
) -> Front:
    """All that fits on this cluster, as far as it matters; `notes` gets the rest."""
    front = Front(by_memory=in_band or config.goal.name == "lowest_memory")
    for name in candidates(config):
        engine = ENGINES[name]
        if faults := version_faults(config, engine):
            notes.refuse(name, faults)
            continue
        for each, wanted in variants(config, engine, pinned):
            for setting in _settings(each, engine, wanted, tables, in_band=in_band):
                _under(setting, wanted, offloads, front, notes)
    return front


def settled(config: RunConfig, found: Scored) -> RunConfig:
    """The configuration with the schedule and the sharding that a candidate stands for."""
    return sharded(scheduled(config, found.schedule), found.sharding, found.shard)


def _under(setting: Setting, wanted: Wanted, offloads: Sequence[str], front: Front, notes: Notes) -> None:
    """All of one setting, in each arrangement on the ranks."""
    for groups in joint.arrangements(setting.config, setting.engine, wanted):
        if conflicts := [fault for group in groups for fault in group.faults()]:
            notes.refuse(setting.engine.name, conflicts)
        elif len(groups) == 1:
            _alone(setting, groups[0], offloads, front, notes)
        else:
            _together(setting, groups, offloads, front, notes)


def _scored(
    setting: Setting, schedule: str, layouts: Mapping[str, Layout], peak_gib: float, step_s: float
) -> Scored:
    """Layouts of the whole model; `peak_gib` has the overhead in it."""
    strategy = setting.config.strategy
    trunk, name = setting.config.model.trunk, setting.engine.name
    return Scored(
        name, schedule, trunk, layouts, peak_gib, step_s, strategy.sharding, layouts[trunk].shard_size
    )


def strategy_of(layout: Layout) -> ComponentStrategy:
    """The layout as a strategy that pins all of it."""
    said = {key: getattr(layout, key) for key in ComponentStrategy.model_fields}
    return ComponentStrategy.model_validate({**said, "etp": layout.expert_tp})


def _settings(
    config: RunConfig, engine: Engine, pinned: Wanted, tables: Tables, *, in_band: bool
) -> Iterator[Setting]:
    """One for each type that gradients may be accumulated in."""
    training, precision = config.training, config.training.precision
    one, several = engine.grad_accum(precision, False), engine.grad_accum(precision, True)
    stages = {want.zero for want in pinned.values() if want.zero is not None}
    narrow = any(several not in engine.grad_accum_choices(precision, stage) for stage in stages)
    passes: list[tuple[str, bool | None]]
    if training.grad_accum_dtype is not None:
        passes = [(training.grad_accum_dtype, None)]
    elif one == several or narrow:
        passes = [(precision if narrow else one, None)]
    else:
        passes = [(one, False), (several, True)]
    for dtype, accumulates in passes:
        yield _setting(config, engine, tables, dtype, accumulates, in_band=in_band)


def _setting(
    config: RunConfig, engine: Engine, tables: Tables, dtype: str, accumulates: bool | None, *, in_band: bool
) -> Setting:
    trunk = config.model.trunk
    any_layout = Layout(1, 1, 1, 1, 1, 1, 0, "none", "none", 1, 1, 0, (1,))
    case = cases(config, engine, {trunk: any_layout}, dtype)[trunk]
    overhead, limit = overhead_gib(case, config.cluster.world_size), limit_gib(config)
    if in_band and (band := memory_band(case, tables)):
        limit /= band.low
    return Setting(config, engine, tables, dtype, accumulates, limit - overhead, overhead)


def _alone(setting: Setting, group: Group, offloads: Sequence[str], front: Front, notes: Notes) -> None:
    """One layout for the whole model."""
    over = setting.overhead_gib

    def wanted(gib: float, seconds: float) -> bool:
        return front.wants(gib + over, seconds)

    for family in _legal_families(setting, group, offloads, notes):
        notes.considered += len(space.batches(setting.config, group, family)) * len(space.recomputes(group))
        for option in fitting(setting, group, family, wanted, whole_model=True):
            if isinstance(option, Misfit):
                notes.misfits.append((setting.who, option))
            elif isinstance(option, Passed):
                notes.passed.add(setting.engine.name)
            elif front.wants(option.peak_gib + over, option.seconds) and _as_accumulated(
                setting, option.layouts
            ):
                found = option.layouts, option.peak_gib + over, option.seconds
                front.add(_scored(setting, family.schedule, *found))


def _legal_families(
    setting: Setting, group: Group, offloads: Sequence[str], notes: Notes
) -> Iterator[Family]:
    """The families that the engine executes, judged by one layout each, whatever recompute and batch."""
    for family in space.families(setting.config, setting.engine, group, offloads):
        sizes = space.batches(setting.config, group, family)
        if not sizes:
            continue
        laid = space.layouts(setting.config, group, family, space.recomputes(group)[0], sizes[0])
        config = scheduled(setting.config, family.schedule)
        if faults := engine_faults(config, laid, setting.engine.name):
            notes.refuse(setting.engine.name, faults, len(sizes) * len(space.recomputes(group)))
        else:
            yield family


def _as_accumulated(setting: Setting, layouts: Mapping[str, Layout]) -> bool:
    """Whether gradients are accumulated in the type that the ledgers were asked for."""
    dtype, faults = grad_accum(setting.config, setting.engine, layouts)
    return not faults and dtype == setting.dtype


def _together(
    setting: Setting, groups: Sequence[Group], offloads: Sequence[str], front: Front, notes: Notes
) -> None:
    """A layout for each group."""
    parts: list[list[Piece]] = []
    if faults := joint.faults(setting, groups, offloads):
        notes.refuse(setting.engine.name, faults)
        return
    shared = groups[0].ranks == setting.config.cluster.world_size
    if not shared and not front.may_win(joint.ideal_s(setting, groups[0])):
        return
    judged = groups if setting.engine.towers_apart else []
    for group in groups[1:]:
        others = [other for other in judged if other is not group]
        parts.append(joint.pieces(setting, group, offloads, lambda gib, s: True, notes, others))
    if not all(parts) or not (sides := joint.merged(setting, parts)):
        return
    least_s = sides[0].step_s

    def promising(gib: float, seconds: float) -> bool:
        step = seconds + least_s if shared else max(seconds, least_s)
        return front.wants(gib + setting.overhead_gib, step)

    for trunk in joint.pieces(setting, groups[0], offloads, promising, notes, judged[1:]):
        for side in sides:
            _pair(setting, trunk, side, front, notes)


def _pair(setting: Setting, trunk: Piece, side: Piece, front: Front, notes: Notes) -> None:
    """The trunk's piece with those beside it, into the front where it belongs there."""
    notes.considered += 1
    over = setting.overhead_gib
    peak, step = trunk.least(side)
    if not (front.wants(peak + over, step) and joint.go_together(setting.engine, trunk, side)):
        return
    whole = trunk.with_(side)
    layouts = {name: whole.layouts[name] for name in setting.config.model.components}
    if whole.peak_gib > setting.limit_gib or not joint.fits_host(setting, whole):
        return
    if front.wants(whole.peak_gib + over, whole.step_s) and _as_accumulated(setting, layouts):
        front.add(_scored(setting, trunk.schedule, layouts, whole.peak_gib + over, whole.step_s))
