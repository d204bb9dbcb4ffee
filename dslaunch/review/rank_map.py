"""Where ranks stand: each component's grid laid over nodes and GPUs, and what its groups cross.

Rank = offset + tp_i + TP * (cp_i + CP * (dp_i + DP * pp_i)), Megatron's and DeepSpeed's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.planfile import ComponentPlan, Plan


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

    @property
    def name(self) -> str:
        return f"node {self.first}" if self.first == self.last else f"nodes {self.first}-{self.last}"


@dataclass(frozen=True)
class Group:
    """Ranks that talk to one another, by the example of the first group."""

    what: str
    """tp | cp | dp | pp | ep"""
    size: int
    ranks: str
    crosses: str
    """`inside a node`, or `2 nodes`."""


def rows(plan: Plan, component: ComponentPlan) -> list[Row]:
    """The whole cluster, in as few rows as there are different nodes in a row."""
    found: list[Row] = []
    places: list[list[Place]] = []
    for node in range(plan.cluster.nodes):
        cells, here = _node(plan, component, node)
        if found and found[-1].cells == cells:
            places[-1] += here
            found[-1] = Row(found[-1].first, node, _replicas(places[-1]), cells)
        else:
            places.append(here)
            found.append(Row(node, node, _replicas(here), cells))
    return found


def groups(plan: Plan, component: ComponentPlan) -> list[Group]:
    """The groups of more than one rank; tp and cp talk in every layer, pp per micro-batch, dp per step or more."""
    c = component
    strides = {
        "tp": (c.tp, 1),
        "cp": (c.cp, c.tp),
        "ep": (c.ep, c.tp * c.cp),
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
        yield f"stage {at.pp}"
    if component.cp > 1:
        yield f"cp {at.cp}"
    if component.tp > 1:
        yield f"tp {at.tp}"


def _replicas(places: list[Place]) -> str:
    if not places:
        return ""
    low, high = min(at.dp for at in places), max(at.dp for at in places)
    return f"dp {low}" if low == high else f"dp {low}-{high}"


def _group(plan: Plan, component: ComponentPlan, name: str, size: int, stride: int) -> Group:
    first = component.rank_offset
    ranks = range(first, first + size * stride, stride)
    nodes = {rank // plan.cluster.gpus_per_node for rank in ranks}
    shown = [str(rank) for rank in ranks]
    text = ", ".join(shown if size <= 8 else [*shown[:3], "...", shown[-1]])
    return Group(name, size, text, "inside a node" if len(nodes) == 1 else f"{len(nodes)} nodes")
