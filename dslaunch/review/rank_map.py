"""Where ranks stand: each component's grid laid over nodes and GPUs, and what its groups cross.

Rank = offset + tp_i + TP * (cp_i + CP * (dp_i + DP * pp_i)), Megatron's and DeepSpeed's order; of experts
etp_i + ETP * (ep_i + EP * ...), without cp (megatron/core/parallel_state.py, core 0.16).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.planfile import ComponentPlan, Plan

_NARROW = "\u00a0"
"""Between a name and its number, so that a cell folds at its commas alone."""


@dataclass(frozen=True)
class Place:
    """One rank in a component's grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Cell:
    """One GPU of a run of nodes."""

    gpu: int
    stage: int | None
    """None where the component is not there."""
    text: str
    """Such as `stage 0, tp 3`."""


@dataclass(frozen=True)
class Row:
    """Nodes next to one another that hold the same stages at the same GPUs."""

    first: int
    last: int
    replicas: str
    """`dp 0-3`, those of the row; empty where the component is not there."""
    cells: tuple[Cell, ...]
    domains: str
    """The NVLink domains that hold them, `0-15`; empty where there are none, or where the plan does not say."""

    @property
    def name(self) -> str:
        return f"node {self.first}" if self.first == self.last else f"nodes {self.first}-{self.last}"


@dataclass(frozen=True)
class Group:
    """Ranks that talk to one another, by the example of the first group."""

    what: str
    """tp | cp | dp | pp | ep | etp"""
    size: int
    ranks: str
    crosses: str
    """`inside a node`, or `2 nodes`, and over which link as far as the plan says."""


def rows(plan: Plan, component: ComponentPlan) -> list[Row]:
    """The whole cluster, in as few rows as there are different nodes in a row."""
    nodes = (_node(plan, component, node) for node in range(plan.cluster.nodes))
    found: list[Row] = []
    for cells, alike in itertools.groupby(nodes, key=lambda node: node[0]):
        here = [places for _, places in alike]
        first = found[-1].last + 1 if found else 0
        last = first + len(here) - 1
        replicas = _replicas([at for places in here for at in places])
        found.append(Row(first, last, replicas, cells, _domains(plan, first, last)))
    return found


def domain_words(plan: Plan) -> str:
    """What NVLink joins, in a sentence; empty where the plan does not say."""
    size, node = plan.cluster.nvlink_domain, plan.cluster.gpus_per_node
    if not size:
        return ""
    if size == 1:
        return "NVLink joins no GPUs here."
    where = "a node" if size == node else f"{size // node} nodes" if size > node else "a part of a node"
    count = plan.world_size // size
    return f"An NVLink domain is {where}, {size} GPUs; there are {count:,}, joined by the network."


def groups(plan: Plan, component: ComponentPlan) -> list[Group]:
    """The groups of more than one rank; tp and cp talk in every layer, pp per micro-batch, dp per step or more."""
    c = component
    strides = {
        "tp": (c.tp, 1),
        "cp": (c.cp, c.tp),
        "ep": (c.ep, c.expert_tp),
        "etp": (c.etp, 1),
        "dp": (c.dp, c.tp * c.cp),
        "pp": (c.pp, c.tp * c.cp * c.dp),
    }
    return [_group(plan, c, name, size, stride) for name, (size, stride) in strides.items() if size > 1]


def place(component: ComponentPlan, rank: int) -> Place | None:
    """Where a global rank stands in the component's grid; None: outside it."""
    index = rank - component.rank_offset
    if not 0 <= index < component.ranks:
        return None
    index, tp = divmod(index, component.tp)
    index, cp = divmod(index, component.cp)
    pp, dp = divmod(index, component.dp)
    return Place(pp, dp, cp, tp)


def _node(plan: Plan, component: ComponentPlan, node: int) -> tuple[tuple[Cell, ...], list[Place]]:
    size = plan.cluster.gpus_per_node
    here = [place(component, node * size + gpu) for gpu in range(size)]
    cells = tuple(_cell(component, gpu, at) for gpu, at in enumerate(here))
    return cells, [at for at in here if at is not None]


def _cell(component: ComponentPlan, gpu: int, at: Place | None) -> Cell:
    if at is None:
        return Cell(gpu, None, "")
    return Cell(gpu, at.pp, ", ".join(_coordinates(component, at)) or "all of it")


def _coordinates(component: ComponentPlan, at: Place) -> Iterator[str]:
    if component.pp > 1:
        yield f"stage{_NARROW}{at.pp}"
    if component.cp > 1:
        yield f"cp{_NARROW}{at.cp}"
    if component.tp > 1:
        yield f"tp{_NARROW}{at.tp}"


def _replicas(places: list[Place]) -> str:
    if not places:
        return ""
    low, high = min(at.dp for at in places), max(at.dp for at in places)
    return f"dp {low}" if low == high else f"dp {low}-{high}"


def _domains(plan: Plan, first: int, last: int) -> str:
    """The domains that hold the nodes from `first` to `last`."""
    size, node = plan.cluster.nvlink_domain, plan.cluster.gpus_per_node
    if size <= 1:
        return ""
    low, high = first * node // size, ((last + 1) * node - 1) // size
    return str(low) if low == high else f"{low}-{high}"


def _group(plan: Plan, component: ComponentPlan, name: str, size: int, stride: int) -> Group:
    first = component.rank_offset
    ranks = range(first, first + size * stride, stride)
    shown = [str(rank) for rank in ranks]
    text = ", ".join(shown if size <= 8 else [*shown[:3], "...", shown[-1]])
    return Group(name, size, text, _crossing(plan, ranks))


def _crossing(plan: Plan, ranks: range) -> str:
    """What the first group crosses; its ranks stand `ranks.step` apart."""
    nodes = len({rank // plan.cluster.gpus_per_node for rank in ranks})
    where = "inside a node" if nodes == 1 else f"{nodes} nodes"
    size = plan.cluster.nvlink_domain
    if not size:
        return where
    domains = len({rank // size for rank in ranks})
    if size > 1 and domains == 1:
        return f"{where}, over NVLink"
    if nodes == 1:
        return f"{where}, without NVLink"
    apart = "" if size == 1 or domains == nodes else f" in {domains} NVLink domains"
    return f"{where}{apart}, over the network"
