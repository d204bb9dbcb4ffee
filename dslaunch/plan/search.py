"""strategy=auto: every legal layout of the trunk is tried, and the fastest that fits is taken.

What the user pinned stays. Components beside the trunk share its layout where it has no tp and pp, and else
run data-parallel over all ranks at ZeRO-2. Offload is tried only where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TypeVar

from dslaunch.errors import PlanError
from dslaunch.hardware.topology import describe, tensor_domain
from dslaunch.model import shapes
from dslaunch.plan.evaluate import Evaluated
from dslaunch.planfile import Candidate
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

T = TypeVar("T")
Wanted = Mapping[str, ComponentStrategy]
Attempt = Callable[[Wanted], tuple[Evaluated | None, str]]


def search(config: RunConfig, pinned: Wanted, attempt: Attempt) -> tuple[Wanted, tuple[Candidate, ...]]:
    """(what the winner wants, the candidates: the winner, the next best, and the nearest refusals).

    Raises:
        PlanError: nothing legal fits; the nearest candidates with their figures.
    """
    refused: list[tuple[str, str]] = []
    for offloads in (("none",), ("cpu", "cpu_params")):
        fitting = []
        for wanted in _space(config, pinned, offloads):
            found, reason = attempt(wanted)
            if found is None:
                refused.append((_describe(config, wanted), reason))
            else:
                fitting.append((found.time.step_s, found.peak_gib, found, wanted))
        if fitting:
            fitting.sort(key=lambda row: row[:2])
            return fitting[0][3], (*_ranked(fitting), *_refused(refused))
    nearest = "\n".join(f"  {layout}: {reason}" for layout, reason in _smallest(refused))
    raise PlanError(
        f"strategy=auto: none of {len(refused)} layouts fits on {describe(config.cluster)}. Nearest:\n{nearest}\n"
        "Use more GPUs, a smaller training.seq_len, or GPUs with more memory."
    )


def _space(config: RunConfig, pinned: Wanted, offloads: tuple[str, ...]) -> Iterator[Wanted]:
    trunk, fused = config.model.trunk, config.model.fused(config.model.trunk)
    want, component, world = pinned[trunk], config.model.components[trunk], config.cluster.world_size
    domain = tensor_domain(config.cluster)
    tps = [n for n in shapes.divisors(domain) if shapes.legal_tp(component, n) is None]
    pps = [n for n in shapes.divisors(world) if n <= shapes.layers(component)]
    for tp, pp, zero, recompute, offload in product(
        _choices(want.tp, tps), _choices(want.pp, pps), _choices(want.zero, [0, 1, 2, 3]),
        _choices(want.recompute, ["none", "selective", "full"]), _choices(want.offload, list(offloads)),
    ):  # fmt: skip
        if world % (tp * pp) or (zero == 0 and world > tp * pp):
            continue
        chosen = want.model_copy(
            update={"tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "offload": offload}
        )
        yield {
            name: chosen if name == trunk else _beside(pinned[name], chosen, fused=name in fused)
            for name in pinned
        }


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
    return f"{config.model.trunk} TP{trunk.tp} PP{trunk.pp} ZeRO-{trunk.zero} recompute {trunk.recompute}"


def _ranked(fitting: list[tuple[float, float, Evaluated, Wanted]]) -> list[Candidate]:
    best = fitting[0][0]
    return [
        Candidate(found.describe(), peak, step, "chosen" if i == 0 else f"slower: x{step / best:.2f}")
        for i, (step, peak, found, _) in enumerate(fitting[:8])
    ]


def _refused(refused: list[tuple[str, str]]) -> list[Candidate]:
    return [Candidate(layout, 0.0, 0.0, f"refused: {reason}") for layout, reason in _smallest(refused)]


def _smallest(refused: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The refusals for memory, smallest first; others where there are none."""
    for_memory = [row for row in refused if " GiB: " in row[1]]
    return sorted(for_memory, key=lambda row: float(row[1].split()[0]))[:4] or refused[:4]
