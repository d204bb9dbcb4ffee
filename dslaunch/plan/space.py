"""What a search may choose for components that share one layout, under one engine.

Every degree that is pinned stays; of the others every value is tried with which the shapes, the ranks and the
batch come out whole: tp within the fast links' domain; pp in equal stages, or with shorter ends where the layers
do not divide; vpp where the engine interleaves; cp that cuts the sequence; ep that shares out the experts, which
tp cuts or, where the engine takes it, nothing does; each ZeRO stage of the engine; each micro-batch that divides
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.versions import orders
from dslaunch.hardware.topology import tensor_domain
from dslaunch.model import shapes
from dslaunch.model.shapes import divisors
from dslaunch.plan.layouts import cut_faults, layout_of
from dslaunch.schema.components import Component, Decoder
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

T = TypeVar("T")
_SHARED = ("tp", "pp", "vpp", "cp", "dp", "zero", "offload", "micro_batch", "rank_offset")
RECOMPUTES = ("none", "selective", "full")
_NEVER_BETTER = frozenset({"gpipe"})
"""Orders that are not tried: 1F1B takes the same time and no more memory. A step fills, runs and drains alike,
and a stage holds min(m, p - i) of the m micro-batches that GPipe holds (`dslaunch.plan.case.Case.in_flight`); what
is beside the pipeline holds no more either (`held_ahead`). tests/real/test_search.py holds the ledgers to it."""
_OFFLOAD_NEEDS = {"none": 0, "cpu": 1, "nvme": 3, "cpu_params": 3, "nvme_params": 3}
"""The lowest ZeRO stage with which something is moved away."""


@dataclass(frozen=True)
class Group:
    """Components that share one layout, what is pinned of each, and the ranks they may have."""

    pins: Mapping[str, ComponentStrategy]
    """By component, the trunk first where it is among them."""
    trunk: bool
    offset: int
    ranks: int

    def pinned(self, key: str) -> object:
        """What the first component that pins `key` says; None where none does."""
        return next((v for want in self.pins.values() if (v := getattr(want, key)) is not None), None)

    def faults(self) -> list[str]:
        """Components that cannot share one layout as they are pinned."""
        found = []
        for key in _SHARED:
            said = {name: v for name, want in self.pins.items() if (v := getattr(want, key)) is not None}
            if len(set(said.values())) > 1:
                shown = ", ".join(f"strategy.{name}.{key} is {value}" for name, value in said.items())
                found.append(f"{shown}: these components have one layout; give them the same {key}")
        return found


@dataclass(frozen=True)
class Family:
    """Layouts that differ in recompute and micro-batch only."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    zero: int
    offload: str
    etp: int | None = None
    """Ranks that share an expert; None: as many as tp."""
    schedule: str = "1f1b"
    """Order of micro-batches."""

    def describe(self) -> str:
        """In words, such as `TP8 PP4 DP2 ZeRO-1`."""
        further = "".join(
            f" {n}{v}" for n, v in (("VPP", self.vpp), ("CP", self.cp), ("EP", self.ep)) if v > 1
        )
        further += f" ETP{self.etp}" if self.etp else ""
        away = "" if self.offload == "none" else f" offload {self.offload}"
        return f"TP{self.tp} PP{self.pp}{further} DP{self.dp} ZeRO-{self.zero}{away}{order_words(self.schedule)}"


def families(config: RunConfig, engine: Engine, group: Group, offloads: Sequence[str]) -> Iterator[Family]:
    """Every family of the group, the plainest first."""
    for tp, pp, vpp, cp, dp in _grids(config, engine, group):
        for etp, ep in _expert_sizes(config, engine, group, tp, dp * cp):
            for zero in _chosen(group.pinned("zero"), sorted(_stages(engine, pp))):
                for offload in _chosen(group.pinned("offload"), [o for o in offloads if o in engine.offload]):
                    if zero >= _OFFLOAD_NEEDS[offload]:
                        for order in _orders(config, engine, pp, vpp):
                            yield Family(tp, pp, vpp, cp, ep, dp, zero, offload, etp, order)


def recomputes(group: Group) -> list[str]:
    """For components that pin none, from the one that keeps most to the one that keeps least."""
    pinned = {want.recompute for want in group.pins.values()}
    return list(RECOMPUTES) if None in pinned else [max(filter(None, pinned), key=RECOMPUTES.index)]


def batches(config: RunConfig, group: Group, family: Family) -> list[tuple[int, int]]:
    """(micro_batch, num_microbatches) that are whole, in each macro-batch too, ascending."""
    per_replica = config.training.global_batch // family.dp
    rounds = config.training.macro_batches * (family.pp if family.vpp > 1 else 1)
    sizes = _chosen(group.pinned("micro_batch"), divisors(per_replica))
    number = config.training.num_microbatches if group.trunk else None
    return [
        (size, per_replica // size)
        for size in sizes
        if per_replica % size == 0
        and per_replica // size % rounds == 0
        and number in (None, per_replica // size)
    ]


def layouts(
    config: RunConfig, group: Group, family: Family, recompute: str, sizes: tuple[int, int]
) -> dict[str, Layout]:
    """The layout of each of the group's components."""
    return {
        name: layout_of(config, name, _want(config, name, pin, group, family, recompute), family.dp, sizes)
        for name, pin in group.pins.items()
    }


def order_words(schedule: str) -> str:
    """An order of micro-batches behind a layout, such as ` zb-h1`; nothing where the degrees tell it."""
    return "" if schedule in ("1f1b", "interleaved") else f" {schedule}"


def _orders(config: RunConfig, engine: Engine, pp: int, vpp: int) -> list[str]:
    """Orders of micro-batches: the usual one, and where none is asked for, all that may be better.

    The interleaved one is 1F1B where stages are whole.
    """
    usual = config.training.order(vpp)
    if usual == "interleaved" and vpp == 1:
        usual = "1f1b"
    if config.training.schedule is not None or pp == 1 or vpp > 1:
        return [usual]
    every = orders(engine, config.engine.version)
    return [usual, *sorted(every - _NEVER_BETTER - {usual, "interleaved"})]


def scheduled(config: RunConfig, wanted: str) -> RunConfig:
    """The configuration with this order of micro-batches."""
    if wanted == config.training.schedule:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"schedule": wanted})})


def reachable(config: RunConfig, engine: Engine, group: Group) -> set[int]:
    """Numbers of ranks, up to the group's, that one of its layouts fills."""
    tps, most = _tensor_sizes(config, engine, group), group.ranks
    components = _components(config, group)
    deepest = min(most, max(shapes.layers(component) for component, _ in components))
    pps = [pp for pp in range(1, deepest + 1) if _splits(config, engine, group, components, pp)]
    dps = _chosen(group.pinned("dp"), divisors(config.training.global_batch))
    return {n for tp in tps for pp in pps for dp in dps if (n := tp * pp * dp) <= most}


def _want(
    config: RunConfig, name: str, pin: ComponentStrategy, group: Group, family: Family, recompute: str
) -> ComponentStrategy:
    component = config.model.components[name]
    stages = _split(component, pin, family.pp, family.vpp)
    return ComponentStrategy.model_construct(  # of values that were validated before
        **{key: getattr(family, key) for key in ("tp", "pp", "vpp", "cp", "dp", "zero", "offload")},
        ep=family.ep if _has_experts(component) else 1,
        etp=family.etp if _has_experts(component) else None,
        recompute=pin.recompute or recompute,  # type: ignore[arg-type]
        layers_per_stage=stages,
        rank_offset=group.offset,
    )


def _grids(config: RunConfig, engine: Engine, group: Group) -> Iterator[tuple[int, int, int, int, int]]:
    """(tp, pp, vpp, cp, dp) that fill the group's ranks and cut the batch evenly."""
    components, dp_pinned = _components(config, group), group.pinned("dp")
    for tp in _tensor_sizes(config, engine, group):
        for pp in divisors(group.ranks // tp) if group.ranks % tp == 0 else []:
            for vpp in _splits(config, engine, group, components, pp):
                left = group.ranks // (tp * pp)
                for cp in _chosen(group.pinned("cp"), _context_sizes(config, engine, group, left)):
                    dp = left // cp
                    whole = left % cp == 0 and config.training.global_batch % dp == 0
                    if whole and dp_pinned in (None, dp):
                        yield tp, pp, vpp, cp, dp


def _components(config: RunConfig, group: Group) -> list[tuple[Component, ComponentStrategy]]:
    return [(config.model.components[name], pin) for name, pin in group.pins.items()]


def _tensor_sizes(config: RunConfig, engine: Engine, group: Group) -> list[int]:
    domain = tensor_domain(config.cluster)
    every = divisors(domain) if "tp" in engine.degrees else [1]
    components = _components(config, group)
    return [
        tp
        for tp in _chosen(group.pinned("tp"), every)
        if domain % tp == 0
        and all(
            shapes.legal_tp(component, tp, experts_apart=pin.etp is not None) is None
            for component, pin in components
        )
    ]


def _splits(
    config: RunConfig,
    engine: Engine,
    group: Group,
    components: list[tuple[Component, ComponentStrategy]],
    pp: int,
) -> list[int]:
    """The vpp with which every component's layers fill pp stages; none where they do not."""
    if group.pinned("pp") not in (None, pp) or (pp > 1 and "pp" not in engine.degrees):
        return []
    several: list[int] = []
    if group.trunk and config.training.order(2) == "interleaved" and {"interleaved"} <= engine.schedules:
        several = [vpp for vpp in divisors(shapes.layers(components[0][0])) if vpp > 1]
    whole = group.pinned("vpp") in (None, 1)
    return [
        vpp
        for vpp in (_chosen(group.pinned("vpp"), [1, *several]) if pp > 1 else [1] * whole)
        if all(_split(component, pin, pp, vpp) for component, pin in components)
    ]


def _split(component: Component, pin: ComponentStrategy, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of each stage: as pinned, equal, or fewer at both ends, which have more to do than layers."""
    total = shapes.layers(component)
    if pin.layers_per_stage:
        legal = shapes.legal_pp(component, pp, vpp, pin.layers_per_stage) is None
        return pin.layers_per_stage if legal else None
    if total % (pp * vpp) == 0:
        return (total // pp,) * pp
    inner = -(-total // pp)
    ends = total - inner * (pp - 2)
    if vpp > 1 or pp > total or ends < 2:
        return None
    return (ends - ends // 2, *(inner,) * (pp - 2), ends // 2)


def _context_sizes(config: RunConfig, engine: Engine, group: Group, ranks: int) -> list[int]:
    if "cp" not in engine.degrees or not group.trunk:
        return [1]
    return [cp for cp in divisors(ranks) if cp == 1 or not cut_faults(config, cp)]


def _expert_sizes(
    config: RunConfig, engine: Engine, group: Group, tp: int, shard: int
) -> Iterator[tuple[int | None, int]]:
    """(etp, ep): every ep that shares out the experts among a stage's tp x shard ranks, of which etp share one.

    An etp that is not pinned is tp, or 1 where the engine cuts experts otherwise.
    """
    components = [component for component, _ in _components(config, group)]
    counts = [c.experts.count for c in components if isinstance(c, Decoder) and c.experts]
    every = divisors(counts[0]) if counts and "ep" in engine.degrees else [1]
    apart = [1] if counts and tp > 1 and "etp" in engine.degrees else []
    for etp in _chosen(group.pinned("etp"), [None, *apart]):
        for ep in _chosen(group.pinned("ep"), every):
            if tp * shard % (ep * (etp or tp)) == 0 and all(count % ep == 0 for count in counts):
                yield etp, ep


def _has_experts(component: Component) -> bool:
    return isinstance(component, Decoder) and component.experts is not None


def _stages(engine: Engine, pp: int) -> frozenset[int]:
    return engine.zero_with_pipeline if pp > 1 and "pp" in engine.degrees else engine.zero


def _chosen(pinned: object, every: list[T]) -> list[T]:
    """The pinned value alone, or all."""
    return every if pinned is None else [pinned]  # type: ignore[list-item]
