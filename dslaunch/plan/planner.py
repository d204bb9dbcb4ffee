"""RunConfig -> (Plan, Prediction): the steps in order. Pure: tables come in as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dslaunch.engines.base import Engine
from dslaunch.errors import PlanError, listed
from dslaunch.hardware.efficiency import UNCALIBRATED, Efficiency
from dslaunch.plan import layouts as layouts_of
from dslaunch.plan.deepspeed_findings import nvme_gib
from dslaunch.plan.engine_choice import choose, grad_accum
from dslaunch.plan.evaluate import Evaluated, evaluate, to_plan, to_prediction
from dslaunch.plan.findings import findings, fits, largest_terms, limit_gib
from dslaunch.plan.remedies import remedies
from dslaunch.plan.search import Refused, search
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
    standing = launch_faults(config) + precision_faults(config) + layouts_of.training_faults(config)
    if config.strategy.name == "auto" and standing:
        raise PlanError("\n".join(standing))
    if config.strategy.name == "auto":
        wanted, candidates = search(config, wanted, lambda w: _attempt(config, w, tables))
    layouts, faults = layouts_of.resolve(config, wanted)
    faults += standing
    engine, engines, engine_faults = choose(config, layouts) if layouts else (None, [], [])
    faults += engine_faults
    if engine is None or faults:
        raise PlanError("\n".join(faults))
    accum, accum_faults = grad_accum(config, engine, layouts)
    if accum_faults:
        raise PlanError("\n".join(accum_faults))
    found = evaluate(config, engine, layouts, accum, tables)
    result = to_plan(config, found, engine, engines, accepted)
    notes = findings(config, engine, found, _what_fits(config, found, tables))
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


def _attempt(config: RunConfig, wanted: Wanted, tables: Efficiency) -> Evaluated | Refused:
    """The ledgers of what is wanted, or what stands against it."""
    layouts, faults = layouts_of.resolve(config, wanted)
    engine: Engine | None = None
    if not faults:
        engine, _, faults = choose(config, layouts)
        faults = [" ".join(fault.strip() for fault in faults[:2])] if engine is None else faults
    if engine is None or faults:
        return Refused(tuple(faults))
    accum, faults = grad_accum(config, engine, layouts)
    if faults:
        return Refused(tuple(faults))
    found = evaluate(config, engine, layouts, accum, tables)
    return found if fits(config, found) else _too_large(config, found)


def _too_large(config: RunConfig, found: Evaluated) -> Refused:
    """Which memory does not hold the plan, in figures: the GPU's, the node's or its NVMe."""
    limit, node, nvme = limit_gib(config), config.cluster.node, nvme_gib(config, found)
    if found.peak_gib > limit:
        terms = ", ".join(f"{term} {gib:.1f}" for term, gib in largest_terms(found)[:2])
        reason = f"{found.peak_gib:.1f} GiB: {terms}"
    elif found.host_gib > node.host_memory_gib:
        reason = f"{found.host_gib:.0f} of {node.host_memory_gib:.0f} GiB of a node's memory"
    else:
        reason = f"{nvme:.0f} of {node.nvme_gib:.0f} GiB of a node's NVMe"
    return Refused((reason,), found.peak_gib / limit + found.host_gib / node.host_memory_gib)


def _what_fits(config: RunConfig, found: Evaluated, tables: Efficiency) -> list[str]:
    """Changes that make it fit, each planned as if it had been typed."""
    if fits(config, found):
        return []

    def attempt(changed: RunConfig) -> Evaluated | None:
        try:
            result = _attempt(changed, layouts_of.pinned(changed), tables)
        except PlanError:
            return None
        return None if isinstance(result, Refused) or launch_faults(changed) else result

    return remedies(config, found, attempt)


def _chosen(config: RunConfig, found: Evaluated) -> Candidate:
    verdict = "chosen" if fits(config, found) else "does not fit"
    return Candidate(found.describe(), found.peak_gib, found.time.step_s, verdict)
