"""Layouts under an engine become a Plan (decisions) and a Prediction (what the ledgers say of them)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.modes import modes
from dslaunch.engines.versions import named
from dslaunch.hardware.corrections import NONE, own_bands
from dslaunch.hardware.efficiency import Tables
from dslaunch.model import params as counts
from dslaunch.plan import memory
from dslaunch.plan.case import Case, cases
from dslaunch.plan.decisions import training_plan, what_runs
from dslaunch.plan.fabric import fabric_variables
from dslaunch.plan.host_memory import page_locked
from dslaunch.plan.profile import Profile, added, fullest, fullest_node_gib, most_on_a_node_gib, profile
from dslaunch.plan.profiling import profile_plan
from dslaunch.plan.time import StepTime, step_time
from dslaunch.planfile import (
    Band,
    Calibration,
    Candidate,
    ComponentPlan,
    EarlierRun,
    EnginePlan,
    Finding,
    MemoryGib,
    Plan,
    Prediction,
    StagePlan,
    StagePrediction,
    WorstRank,
    to_json,
)
from dslaunch.schema.config import RunConfig

NO_BAND = "band: none yet"


@dataclass(frozen=True)
class Evaluated:
    """A layout and its ledgers."""

    cases: dict[str, Case]
    memory: dict[str, tuple[MemoryGib, ...]]
    overhead_gib: float
    worst_rank: int
    peak_gib: float
    host_gib: float
    pinned_gib: float
    """Page-locked, on the node with most of it."""
    time: StepTime

    @property
    def trunk(self) -> Case:
        return next(case for case in self.cases.values() if case.is_trunk)

    def describe(self) -> str:
        """The layouts in words; components that share one are named together."""
        names: dict[str, list[str]] = {}
        for name, case in self.cases.items():
            names.setdefault(case.layout.describe(), []).append(name)
        return ", ".join(f"{'+'.join(group)} {layout}" for layout, group in names.items())

    def on_worst_rank(self) -> Iterator[tuple[str, int]]:
        """(component, stage) that the fullest rank holds."""
        for name, case in self.cases.items():
            each = case.layout.ranks // case.layout.pp
            stage = (self.worst_rank - case.layout.rank_offset) // each
            if 0 <= stage < case.layout.pp:
                yield name, stage


def evaluate(
    config: RunConfig,
    engine: Engine,
    layouts: Mapping[str, Layout],
    grad_accum_dtype: str,
    tables: Tables,
) -> Evaluated:
    """The ledgers of `layouts`; every key in them is legal for `engine`."""
    by_name = cases(config, engine, layouts, grad_accum_dtype)
    ledger = {
        name: tuple(
            memory.stage_memory(case, stage, case.correction(tables).memory)
            for stage in range(case.layout.pp)
        )
        for name, case in by_name.items()
    }
    host = {
        name: [memory.host_gib_per_rank(case, stage) for stage in range(case.layout.pp)]
        for name, case in by_name.items()
    }
    ranks = added(
        [
            profile(case.layout, [stage.total for stage in ledger[name]], host[name])
            for name, case in by_name.items()
        ]
    )
    worst, slots = fullest(ranks), config.cluster.slots
    pinned = added([_pinned(case) for case in by_name.values()])
    overhead = memory.overhead_gib(next(iter(by_name.values())), config.cluster.world_size)
    return Evaluated(
        cases=by_name,
        memory=ledger,
        overhead_gib=overhead,
        worst_rank=worst.first,
        peak_gib=worst.gib + overhead,
        host_gib=fullest_node_gib(ranks, slots),
        pinned_gib=most_on_a_node_gib(pinned, slots),
        time=step_time(by_name, tables),
    )


def _pinned(case: Case) -> Profile:
    """Page-locked memory by rank, in place of all host memory."""
    stages = range(case.layout.pp)
    return profile(case.layout, [0.0] * case.layout.pp, [page_locked(case, i) / memory.GIB for i in stages])


def to_plan(
    config: RunConfig, found: Evaluated, engine: Engine, engines: Sequence[str], accepted: Sequence[str]
) -> Plan:
    """The decisions."""
    any_case = next(iter(found.cases.values()))
    cluster, program = what_runs(config, engine)
    return Plan(
        name=config.name,
        recipe=config.recipe,
        strategy=config.strategy.name,
        world_size=config.cluster.world_size,
        global_batch=config.training.global_batch,
        cluster=cluster,
        training=training_plan(config, any_case.grad_accum_dtype, found.cases[config.model.trunk].layout.vpp),
        engine=EnginePlan(
            name=engine.name,
            version=named(config.engine.version, engine.versions) or engine.versions[0],
            sharding=config.strategy.sharding,
            path=config.engine.path,
            shard_size=any_case.layout.shard_size or 0,
            modes=modes(config, engine.name, found.cases[config.model.trunk].layout),
            extra=config.engine.extra,
        ),
        engines=tuple(engines),
        components={name: _component_plan(case) for name, case in found.cases.items()},
        env_names=tuple(sorted(config.env)),
        model=config.model.model_dump(mode="json", by_alias=True),
        accepted=tuple(sorted(accepted)),
        fabric=fabric_variables(config),
        profile=profile_plan(config),
        **program,
    )


def to_prediction(
    config: RunConfig, plan: Plan, found: Evaluated, findings: Sequence[Finding],
    candidates: Sequence[Candidate], tables: Tables,
) -> Prediction:  # fmt: skip
    """What the ledgers say of the plan."""
    step, gpus = found.time.step_s, config.cluster.world_size
    gpu = config.cluster.gpu
    peak = gpu.peak_tflops.get(config.training.precision, gpu.peak_tflops.get("fp32", 1.0)) * 1e12 * gpus
    corrected = found.trunk.correction(tables)
    reserved = corrected.memory * sum(
        memory.reserved_gib(found.cases[name], stage) for name, stage in found.on_worst_rank()
    )
    sha256 = hashlib.sha256(to_json(plan).encode()).hexdigest()
    return Prediction(
        components={name: _stage_predictions(found, name) for name in found.cases},
        overhead_gib=found.overhead_gib,
        worst=WorstRank(found.worst_rank, _terms_on_rank(found)),
        peak_memory_gib=found.peak_gib,
        gpu_memory_gib=gpu.memory_gib,
        allocated_gib=found.peak_gib - found.overhead_gib,
        reserved_gib=reserved,
        nvidia_smi_gib=reserved + found.overhead_gib,
        memory_limit_gib=gpu.memory_gib * config.goal.memory_fraction,
        host_memory_gib=found.host_gib,
        host_limit_gib=config.cluster.node.host_memory_gib,
        host_pinned_gib=found.pinned_gib,
        step_time_s=step,
        tokens_per_s=config.training.global_batch * config.training.seq_len / step,
        samples_per_s=config.training.global_batch / step,
        mfu=found.time.model_flops / step / peak,
        hfu=found.time.hardware_flops / step / peak,
        bubble=found.time.bubble,
        usd_per_step=_price(config, step),
        band=_band_words(found, tables),
        memory_band=memory_band(found.trunk, tables),
        time_band=time_band(found.trunk, tables),
        findings=tuple(findings),
        candidates=tuple(candidates),
        tables_sha256=tables.sha256(),
        plan_sha256=sha256,
        calibration=_calibration(found, tables, sha256),
    )


def memory_band(trunk: Case, tables: Tables) -> Band | None:
    """The band of the software that runs the plan: that of the site's own runs, or of published ones."""
    own, published = _own_bands(trunk, tables), tables.memory_bands.get(trunk.software.family)
    return own[1] if own and own[1] else published


def time_band(trunk: Case, tables: Tables) -> Band | None:
    """The same of the step."""
    own = _own_bands(trunk, tables)
    return own[0] if own else tables.time_bands.get(trunk.software.family)


def _own_bands(trunk: Case, tables: Tables) -> tuple[Band, Band | None] | None:
    corrected, family = trunk.correction(tables), trunk.software.family
    if not corrected.runs:
        return None
    return own_bands(corrected, tables.time_bands.get(family), tables.memory_bands.get(family))


def _calibration(found: Evaluated, tables: Tables, plan_sha256: str) -> Calibration | None:
    case = found.trunk
    corrected = case.correction(tables)
    if corrected == NONE:
        return None
    return Calibration(
        key=tables.key(case.config.cluster.gpu.name, case.software.family, case.engine.deepspeed),
        time=corrected.time,
        memory=corrected.memory,
        runs=len(corrected.runs),
        plans=corrected.plans,
        shipped_sha256=tables.shipped_sha256(),
        measured=tuple(
            EarlierRun(run.run, run.step_s, run.memory_gib)
            for run in corrected.runs
            if run.plan_sha256 == plan_sha256
        ),
    )


def _band_words(found: Evaluated, tables: Tables) -> str:
    """Both bands, in GiB and seconds."""
    words = []
    if memory := memory_band(found.trunk, tables):
        low, high = found.peak_gib * memory.low, found.peak_gib * memory.high
        words.append(f"memory {low:.1f} to {high:.1f} GiB ({memory.describe()})")
    if time := time_band(found.trunk, tables):
        low, high = found.time.step_s * time.low, found.time.step_s * time.high
        words.append(f"step {low:.3g} to {high:.3g} s ({time.describe()})")
    return f"band: {'; '.join(words)}" if words else NO_BAND


def _price(config: RunConfig, step_s: float) -> float | None:
    price = config.cluster.price_per_gpu_hour
    return None if price is None else price * config.cluster.world_size * step_s / 3600


def _component_plan(case: Case) -> ComponentPlan:
    layout, component, optimizer = case.layout, case.component, case.config.training.optimizer
    stages = []
    for stage in range(layout.pp):
        on_rank = case.params_on_rank(stage)
        layers = layout.layers_per_stage[stage]
        stages.append(
            StagePlan(stage, layout.stage_ranks(stage), layers, on_rank, case.counts(stage).trained)
        )
    return ComponentPlan(
        tp=layout.tp, pp=layout.pp, vpp=layout.vpp, cp=layout.cp, ep=layout.ep, dp=layout.dp,
        zero=layout.zero,
        offload=layout.offload,
        recompute=layout.recompute,
        micro_batch=layout.micro_batch,
        num_microbatches=layout.num_microbatches,
        rank_offset=layout.rank_offset,
        params=counts.params(component),
        trainable=counts.trainable(component),
        lr=component.lr or optimizer.lr,
        weight_decay=optimizer.weight_decay if component.weight_decay is None else component.weight_decay,
        layers_per_stage=layout.layers_per_stage,
        stages=tuple(stages),
        etp=layout.expert_tp or 0,
    )  # fmt: skip


def _stage_predictions(found: Evaluated, name: str) -> tuple[StagePrediction, ...]:
    case = found.cases[name]
    return tuple(
        StagePrediction(
            stage=stage,
            memory_gib=found.memory[name][stage],
            host_gib_per_rank=memory.host_gib_per_rank(case, stage),
            pinned_gib_per_rank=page_locked(case, stage) / memory.GIB,
            time_s=found.time.stages[name][stage],
        )
        for stage in range(case.layout.pp)
    )


def _terms_on_rank(found: Evaluated) -> dict[str, float]:
    """The worst rank's memory by component and term, and the overhead; what is zero is left out."""
    terms: dict[str, float] = {"overhead": found.overhead_gib}
    for name, stage in found.on_worst_rank():
        row = vars(found.memory[name][stage])
        terms |= {f"{name}/{term}": v for term, v in row.items() if term != "total" and v > 0}
    return terms
