"""RunConfig -> (Plan, Prediction): the steps in order. Pure: tables come in as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.errors import PlanError, listed
from dslaunch.hardware.efficiency import UNCALIBRATED, Efficiency
from dslaunch.plan import layouts as layouts_of
from dslaunch.plan.engine_choice import choose, grad_accum
from dslaunch.plan.evaluate import Evaluated, evaluate, to_plan, to_prediction
from dslaunch.plan.findings import findings, fits, largest_terms
from dslaunch.plan.remedies import remedies
from dslaunch.plan.search import search
from dslaunch.planfile import Candidate, Plan, Prediction
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

Wanted = Mapping[str, ComponentStrategy]


def plan(
    config: RunConfig, tables: Efficiency = UNCALIBRATED, accepted: Sequence[str] = ()
) -> tuple[Plan, Prediction]:
    """The plan of a configuration, and what the ledgers say of it.

    Args:
        tables: shares of peak figures that programs reach.
        accepted: rules that the user waives; recorded in the plan.

    Raises:
        PlanError: the layout is illegal (every fault, with its arithmetic), or no engine executes it.
    """
    wanted: Wanted = layouts_of.pinned(config)
    candidates: tuple[Candidate, ...] = ()
    if config.strategy.name == "auto":
        wanted, candidates = search(config, wanted, lambda w: _attempt(config, w, tables))
    layouts, faults = layouts_of.resolve(config, wanted)
    faults += launch_faults(config) + precision_faults(config)
    engine, engines, engine_faults = choose(config, layouts) if layouts else (None, [], [])
    faults += engine_faults
    if engine is None or faults:
        raise PlanError("\n".join(faults))
    accum, accum_faults = grad_accum(config, engine, layouts)
    if accum_faults:
        raise PlanError("\n".join(accum_faults))
    found = evaluate(config, engine, layouts, accum, tables)
    result = to_plan(config, found, engine, engines, accepted)
    notes = findings(config, engine, found, _what_fits(config, engine, found, tables))
    return result, to_prediction(
        config, result, found, notes, candidates or (_chosen(config, found),), tables
    )


def launch_faults(config: RunConfig) -> list[str]:
    """What a launcher could not do with this cluster."""
    cluster, launcher = config.cluster, config.launcher
    if launcher.name == "ssh" and not cluster.hosts and not launcher.hostfile:
        return [
            f"launcher is ssh on {cluster.node_count} nodes, but no host is named: give launcher.hostfile=FILE "
            f"(lines `HOST slots={cluster.slots}`), or cluster.hosts"
        ]
    if launcher.name in ("local", "torchrun") and cluster.node_count > 1:
        return [
            f"launcher is {launcher.name}, which starts one node, but the cluster has {cluster.node_count}: "
            "use launcher=ssh with a hostfile, or launcher=slurm"
        ]
    return []


def precision_faults(config: RunConfig) -> list[str]:
    """A data type that the GPU lacks."""
    gpu, precision = config.cluster.gpu, config.training.precision
    if precision in gpu.peak_tflops:
        return []
    has = listed(sorted(gpu.peak_tflops))
    return [
        f"training.precision is {precision}, but {gpu.name} computes in {has}; nearest: training.precision=fp16"
    ]


def _attempt(config: RunConfig, wanted: Wanted, tables: Efficiency) -> tuple[Evaluated | None, str]:
    """The ledgers of what is wanted and an empty reason, or None and the first reason against it."""
    layouts, faults = layouts_of.resolve(config, wanted)
    engine: Engine | None = None
    if not faults:
        engine, _, faults = choose(config, layouts)
    if engine is None or faults:
        return None, faults[0]
    accum, faults = grad_accum(config, engine, layouts)
    if faults:
        return None, faults[0]
    found = evaluate(config, engine, layouts, accum, tables)
    if fits(config, found):
        return found, ""
    terms = ", ".join(f"{term} {gib:.1f}" for term, gib in largest_terms(found)[:2])
    return None, f"{found.peak_gib:.1f} GiB: {terms}"


def _what_fits(config: RunConfig, engine: Engine, found: Evaluated, tables: Efficiency) -> list[str]:
    """Changes that make it fit under the same engine."""
    if fits(config, found):
        return []
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": engine.name})})

    def attempt(changed: RunConfig) -> Evaluated | None:
        wanted = {n: _as_strategy(case.layout) for n, case in found.cases.items()}
        overlaid = {
            n: ComponentStrategy(**{**w.model_dump(), **_given(changed, n)}) for n, w in wanted.items()
        }
        return _attempt(changed, overlaid, tables)[0]

    return remedies(config, found, attempt)


def _as_strategy(layout: Layout) -> ComponentStrategy:
    """A resolved layout as a wish again, with dp left to follow from the ranks."""
    kept = ("tp", "pp", "vpp", "cp", "ep", "zero", "offload", "recompute")
    return ComponentStrategy(**{key: getattr(layout, key) for key in kept})


def _given(config: RunConfig, name: str) -> dict[str, object]:
    strategy = config.strategy.components.get(name, ComponentStrategy())
    return strategy.model_dump(exclude_none=True)


def _chosen(config: RunConfig, found: Evaluated) -> Candidate:
    verdict = "chosen" if fits(config, found) else "does not fit"
    return Candidate(found.describe(), found.peak_gib, found.time.step_s, verdict)
