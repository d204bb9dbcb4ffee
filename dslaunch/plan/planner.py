"""RunConfig -> (Plan, Prediction): the steps in order. Pure: tables come in as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dslaunch.errors import PlanError, listed
from dslaunch.hardware.efficiency import SHIPPED, Tables
from dslaunch.plan import account
from dslaunch.plan import layouts as layouts_of
from dslaunch.plan.decisions import runtime_faults
from dslaunch.plan.engine_choice import choose, grad_accum, require_version
from dslaunch.plan.evaluate import Evaluated, evaluate, memory_band, to_plan, to_prediction
from dslaunch.plan.findings import chosen_freely, findings, fits, loading_gib
from dslaunch.plan.goals import goal_faults, resized
from dslaunch.plan.interval import planned_interval, with_interval
from dslaunch.plan.joint import Wanted
from dslaunch.plan.remedies import remedies as remedies_of
from dslaunch.plan.search import Found, search
from dslaunch.plan.sharding import sharded
from dslaunch.plan.space import scheduled
from dslaunch.planfile import Candidate, Plan, Prediction
from dslaunch.schema.config import RunConfig


def plan(
    config: RunConfig, tables: Tables | None = None, accepted: Sequence[str] = ()
) -> tuple[Plan, Prediction]:
    """The plan of a configuration, and what the ledgers say of it.

    Args:
        tables: shares of peak figures that programs reach; the shipped ones where None.
        accepted: rules that the user waives; recorded in the plan.

    Raises:
        ConfigError: a version of the engine that isn't known.
        PlanError: the layout is illegal (every fault, with its arithmetic), or no engine executes it.
    """
    require_version(config)
    tables = tables or SHIPPED
    wanted: Wanted = layouts_of.pinned(config)
    standing = _standing_faults(config)
    found: Found | None = None
    if config.strategy.name == "auto":
        if standing:
            raise PlanError("\n".join(standing))
        found = _searched(config, wanted, tables)
        config, wanted = found.config, found.wanted
    layouts, faults = layouts_of.resolve(config, wanted)
    faults += [fault for fault in standing if fault not in faults]
    engine, engines, engine_faults = (
        choose(config, layouts, found.chosen.engine if found else "") if layouts else (None, [], [])
    )
    faults += engine_faults
    if engine is None or faults:
        raise PlanError("\n".join(faults))
    accum, accum_faults = grad_accum(config, engine, layouts)
    if late := [*accum_faults, *runtime_faults(config, engine)]:
        raise PlanError("\n".join(late))
    result = evaluate(config, engine, layouts, accum, tables)
    checkpoint = planned_interval(config, result.time.step_s)
    made = with_interval(to_plan(config, result, engine, engines, accepted), config, checkpoint)
    remedies = [] if found else _what_fits(config, result, tables)
    notes = [
        *findings(config, engine, result, memory_band(result.trunk, tables), remedies),
        *(chosen_freely(config, result) if found else []),
    ]
    candidates = account.candidates(found) if found else (_chosen(config, result),)
    prediction = to_prediction(config, made, result, notes, candidates, tables)
    return made, replace(
        prediction,
        search=account.report(found) if found else None,
        checkpoint=checkpoint,
        host_loading_gib=loading_gib(config, engine, result),
    )


def settled(config: RunConfig, made: Plan) -> RunConfig:
    """The configuration with what a search decided: how many nodes, the order of micro-batches, who shards."""
    decided = scheduled(resized(config, made.cluster.nodes), made.training.schedule)
    return sharded(decided, made.engine.sharding, made.engine.shard_size or None)


def _searched(config: RunConfig, pinned: Wanted, tables: Tables) -> Found:
    """What fits; where nothing does, what the error band of memory lets fit, which a finding then says."""
    found = search(config, pinned, tables)
    if isinstance(found, Found):
        return found
    nearest = search(config, pinned, tables, in_band=True) if found.misfits else found
    if isinstance(nearest, Found):
        return nearest
    raise account.nothing_fits(config, pinned, found)


def _standing_faults(config: RunConfig) -> list[str]:
    """What no layout changes."""
    return [
        *launch_faults(config),
        *precision_faults(config),
        *layouts_of.training_faults(config),
        *layouts_of.sequence_faults(config, {}),
        *goal_faults(config),
    ]


def launch_faults(config: RunConfig) -> list[str]:
    """What a launcher could not do with this cluster."""
    cluster, launcher = config.cluster, config.launcher
    sizes = cluster.unequal or (cluster.slots,) * cluster.node_count
    named = cluster.hosts or launcher.hostfile or launcher.hosts_command
    if launcher.name == "ssh" and not named:
        lines = " and ".join(f"`HOST slots={size}`" for size in sorted(set(sizes), reverse=True))
        return [
            f"launcher is ssh on {len(sizes)} nodes, but no host is named: give launcher.hostfile=FILE "
            f"(lines {lines}), launcher.hosts_command=COMMAND, which prints them, or cluster.hosts"
        ]
    if launcher.container.kind != "none" and launcher.name not in ("auto", "slurm"):
        image = ", and name the image in launcher.kubernetes.image" if launcher.name == "kubernetes" else ""
        return [
            f"launcher.container.kind is {launcher.container.kind}, which job.sbatch starts, but launcher is "
            f"{launcher.name}, which starts the ranks outside of it; use launcher=slurm, or leave "
            f"launcher.container out{image}"
        ]
    if launcher.name in ("local", "torchrun") and cluster.node_count > 1:
        return [
            f"launcher is {launcher.name}, which starts one node, but the cluster has {len(sizes)}: "
            "use launcher=ssh with a hostfile, or launcher=slurm"
        ]
    return []


def precision_faults(config: RunConfig) -> list[str]:
    """A data type that the GPU lacks."""
    gpu, precision = config.cluster.gpu, config.training.precision
    if precision in gpu.peak_tflops:
        return []
    has = sorted(gpu.peak_tflops)
    nearest = next(other for other in ("fp16", "bf16", *has) if other in has)
    return [
        f"training.precision is {precision}, but {gpu.name} computes in {listed(has)}; "
        f"nearest: training.precision={nearest}"
    ]


def _attempt(config: RunConfig, tables: Tables) -> Evaluated | None:
    """The ledgers of what is pinned, where it is legal and fits."""
    layouts, faults = layouts_of.resolve(config, layouts_of.pinned(config))
    if faults or launch_faults(config):
        return None
    engine, _, faults = choose(config, layouts)
    if engine is None or faults:
        return None
    accum, faults = grad_accum(config, engine, layouts)
    if faults:
        return None
    found = evaluate(config, engine, layouts, accum, tables)
    return found if fits(config, found) else None


def _what_fits(config: RunConfig, found: Evaluated, tables: Tables) -> list[str]:
    """Changes that make it fit, each planned as if it had been typed."""
    if fits(config, found):
        return []

    def attempt(changed: RunConfig) -> Evaluated | None:
        try:
            return _attempt(changed, tables)
        except PlanError:
            return None

    return remedies_of(config, found, attempt)


def _chosen(config: RunConfig, found: Evaluated) -> Candidate:
    verdict = "chosen" if fits(config, found) else "does not fit"
    return Candidate(found.describe(), found.peak_gib, found.time.step_s, verdict)
