"""What differs between two plans, their files, their figures and their findings."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.planfile import ComponentPlan, Finding, Plan, Prediction
from dslaunch.review.classes import Kind, kind_of_file, kind_of_key
from dslaunch.review.side import OWN, Side

_DERIVED = frozenset({"engines", "schema", "global_batch"})
"""Keys that follow from others, or stand twice, as global_batch does beside training.global_batch."""
_LAYOUT = frozenset({
    "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "offload", "recompute", "micro_batch", "num_microbatches",
    "rank_offset", "ranks",
})  # fmt: skip
_CONTEXT_LINES = 2
_NUMBERS = re.compile(r"\d[\d.,]*")
_PLACE = re.compile(r":\d+:\d+$")


@dataclass(frozen=True)
class KeyChange:
    """One key of plan.json."""

    key: str
    kind: Kind
    before: Any
    """None where the key was not there."""
    after: Any
    """None where the key is not there any more."""


@dataclass(frozen=True)
class LayoutChange:
    """The layout of one component in words, before and after; empty where the model lacks the component."""

    component: str
    before: str
    after: str


@dataclass(frozen=True)
class FileChange:
    """One rendered file."""

    name: str
    status: Literal["added", "removed", "changed"]
    kind: Kind
    diff: tuple[str, ...]
    """Lines of a unified diff, without its two header lines."""


@dataclass(frozen=True)
class Figure:
    """One predicted figure, before and after; None where it is not known."""

    name: str
    unit: str
    before: float | None
    after: float | None
    of: float | None = None
    """Of which `after` is a part: the memory of a GPU or node."""

    @property
    def change(self) -> float | None:
        """(after - before) / before; None where that says nothing."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return self.after / self.before - 1


def key_changes(before: Plan, after: Plan) -> tuple[KeyChange, ...]:
    """The keys of plan.json that differ, in the order of the gravest class, then of the plan."""
    old, new = dict(plan_keys(before)), dict(plan_keys(after))
    shown = [key for key in dict.fromkeys([*old, *new]) if shown_key(key)]
    return tuple(
        KeyChange(key, kind_of_key(key), old.get(key), new.get(key))
        for key in shown
        if _differs(old.get(key), new.get(key))
    )


def plan_keys(plan: Plan) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value of plan.json; lists are values."""
    yield from _flat("", dataclasses.asdict(plan))


def shown_key(key: str) -> bool:
    """Whether a change of this key says more than those of other keys."""
    return key not in _DERIVED and not (key.startswith("components.") and key.endswith(".stages"))


def is_layout(key: str) -> bool:
    """Whether `layout_words` says it."""
    return key.startswith("components.") and key.rpartition(".")[2] in _LAYOUT


def layout_changes(before: Plan, after: Plan) -> tuple[LayoutChange, ...]:
    """The components whose layouts differ."""
    names = dict.fromkeys([*before.components, *after.components])
    rows = [LayoutChange(n, _layout(before, n), _layout(after, n)) for n in names]
    return tuple(row for row in rows if row.before != row.after)


def layout_words(c: ComponentPlan) -> str:
    """Such as `TP8 PP4 DP2 ZeRO-1, recompute selective, batch 1 x 256 x 2, ranks 0-63`."""
    more = "".join(f" {k}{v}" for k, v in (("VPP", c.vpp), ("CP", c.cp), ("EP", c.ep)) if v > 1)
    more += f" ETP{c.etp}" if c.etp else ""
    offload = "" if c.offload == "none" else f", offload {c.offload}"
    recompute = "" if c.recompute == "none" else f", recompute {c.recompute}"
    return (
        f"TP{c.tp} PP{c.pp}{more} DP{c.dp} ZeRO-{c.zero}{offload}{recompute}, batch {c.micro_batch} x "
        f"{c.num_microbatches} x {c.dp}, ranks {c.rank_offset}-{c.rank_offset + c.ranks - 1}"
    )


def file_changes(before: Side, after: Side, keys: Sequence[KeyChange]) -> tuple[FileChange, ...]:
    """The rendered files that differ, those aside that only say what the others hold."""
    planned = [change.kind for change in keys]
    names = sorted({*before.files, *after.files} - OWN)
    return tuple(
        _file_change(name, before.files.get(name), after.files.get(name), planned)
        for name in names
        if before.files.get(name) != after.files.get(name)
    )


def figures(before: Side, after: Side) -> tuple[Figure, ...]:
    """Hosts, memory by component, time and cost, before and after, those that stay the same too."""
    old, new = _figures(before), _figures(after)
    limits = _limits(after.prediction)
    return tuple(
        Figure(
            name, unit, old.get((name, unit)), new.get((name, unit)), limits.get(name.partition(" of ")[0])
        )
        for name, unit in dict.fromkeys([*old, *new])
        if old.get((name, unit)) is not None or new.get((name, unit)) is not None
    )


def finding_changes(before: Side, after: Side) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """(new findings, gone findings); one that only moved, or names another number, is neither."""
    return _beyond(after.findings, before.findings), _beyond(before.findings, after.findings)


def _beyond(some: Sequence[Finding], others: Sequence[Finding]) -> tuple[Finding, ...]:
    left = Counter(map(_identity, others))
    found = []
    for finding in some:
        if left[_identity(finding)] > 0:
            left[_identity(finding)] -= 1
        else:
            found.append(finding)
    return tuple(found)


def _identity(finding: Finding) -> tuple[str, str, str, str]:
    place, message = _PLACE.sub("", finding.where), _NUMBERS.sub("", finding.message)
    return finding.rule, finding.severity, place, message


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value


def _differs(old: Any, new: Any) -> bool:
    """An empty section is none: `modes = {}` beside `modes.nvme` is no change of its own."""
    return bool(old != new and not (old in ({}, None) and new in ({}, None)))


def _layout(plan: Plan, name: str) -> str:
    return layout_words(plan.components[name]) if name in plan.components else ""


def _file_change(name: str, old: str | None, new: str | None, planned: Sequence[Kind]) -> FileChange:
    before, after = old or "", new or ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=_CONTEXT_LINES)
    status: Literal["added", "removed", "changed"] = (
        "added" if old is None else "removed" if new is None else "changed"
    )
    return FileChange(name, status, kind_of_file(name, before, after, planned), tuple(lines)[2:])


def _figures(side: Side) -> dict[tuple[str, str], float | None]:
    plan, found = side.plan, side.prediction
    rows: dict[tuple[str, str], float | None] = {
        ("nodes", ""): plan.cluster.nodes,
        ("GPUs", ""): plan.world_size,
    }
    if found is None:
        return rows
    rows |= {(f"memory of {name}", "GiB"): gib for name, gib in component_gib(found).items()}
    hours = plan.world_size * found.step_time_s * plan.training.steps / 3600
    usd = found.usd_per_step
    return rows | {
        ("memory of the fullest GPU", "GiB"): found.peak_memory_gib,
        ("limit of a GPU", "GiB"): found.memory_limit_gib,
        ("host memory of a node", "GiB"): found.host_memory_gib,
        ("step", "s"): found.step_time_s,
        ("throughput", "tokens/s"): found.tokens_per_s,
        ("MFU", "%"): 100 * found.mfu,
        ("whole run", "GPU hours"): hours,
        ("whole run", "USD"): None if usd is None else usd * plan.training.steps,
    }


def _limits(prediction: Prediction | None) -> dict[str, float]:
    """What a GPU, and a node's host, have in all, in GiB."""
    if prediction is None:
        return {}
    return {"memory": prediction.gpu_memory_gib, "host memory": prediction.host_limit_gib}


def component_gib(prediction: Prediction) -> dict[str, float]:
    """GiB that each component takes on a GPU of its fullest stage."""
    return {
        name: max(stage.memory_gib.total for stage in stages)
        for name, stages in prediction.components.items()
    }
