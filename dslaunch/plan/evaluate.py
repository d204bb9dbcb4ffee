"""Layouts under an engine become a Plan (decisions) and a Prediction (what the ledgers say of them)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.hardware.efficiency import Efficiency
from dslaunch.model import params as counts
from dslaunch.plan import memory
from dslaunch.plan.case import Case, cases
from dslaunch.plan.decisions import training_plan, what_runs
from dslaunch.plan.time import StepTime, step_time
from dslaunch.planfile import (
    Candidate,
    ComponentPlan,
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
    time: StepTime

    def describe(self) -> str:
        """The layouts in words; components that share one are named together."""
        names: dict[str, list[str]] = {}
        for name, case in self.cases.items():
            names.setdefault(case.layout.describe(), []).append(name)
        return ", ".join(f"{'+'.join(group)} {layout}" for layout, group in names.items())


def evaluate(
    config: RunConfig,
    engine: Engine,
    layouts: Mapping[str, Layout],
    grad_accum_dtype: str,
    tables: Efficiency,
) -> Evaluated:
    """The ledgers of `layouts`; every key in them is legal for `engine`."""
    by_name = cases(config, engine, layouts, grad_accum_dtype)
    ledger = {
        name: tuple(memory.stage_memory(case, stage) for stage in range(case.layout.pp))
        for name, case in by_name.items()
    }
    totals = {name: [stage.total for stage in stages] for name, stages in ledger.items()}
    on_rank = _per_rank(config, by_name, totals)
    worst = max(on_rank, key=lambda rank: (on_rank[rank], -rank))
    first = next(iter(by_name.values()))
    overhead = memory.overhead_gib(first, config.cluster.world_size)
    host = {
        name: [memory.host_gib_per_rank(case, stage) for stage in range(case.layout.pp)]
        for name, case in by_name.items()
    }
    return Evaluated(
        cases=by_name,
        memory=ledger,
        overhead_gib=overhead,
        worst_rank=worst,
        peak_gib=on_rank[worst] + overhead,
        host_gib=memory.host_gib_per_node(_per_rank(config, by_name, host), config.cluster.slots),
        time=step_time(by_name, tables),
    )


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
        training=training_plan(config, any_case.grad_accum_dtype),
        engine=EnginePlan(
            name=engine.name,
            version=config.engine.version or engine.versions[0],
            sharding=config.strategy.sharding,
            path=config.engine.path,
            shard_size=any_case.layout.shard_size or 0,
        ),
        engines=tuple(engines),
        components={name: _component_plan(case) for name, case in found.cases.items()},
        env_names=tuple(sorted(config.env)),
        model=config.model.model_dump(mode="json", by_alias=True),
        accepted=tuple(sorted(accepted)),
        **program,
    )


def to_prediction(
    config: RunConfig, plan: Plan, found: Evaluated, findings: Sequence[Finding],
    candidates: Sequence[Candidate], tables: Efficiency,
) -> Prediction:  # fmt: skip
    """What the ledgers say of the plan."""
    step, gpus = found.time.step_s, config.cluster.world_size
    gpu = config.cluster.gpu
    peak = gpu.peak_tflops.get(config.training.precision, gpu.peak_tflops.get("fp32", 1.0)) * 1e12 * gpus
    return Prediction(
        components={name: _stage_predictions(found, name) for name in found.cases},
        overhead_gib=found.overhead_gib,
        worst=WorstRank(found.worst_rank, _terms_on_rank(found)),
        peak_memory_gib=found.peak_gib,
        gpu_memory_gib=gpu.memory_gib,
        memory_limit_gib=gpu.memory_gib * config.goal.memory_fraction,
        host_memory_gib=found.host_gib,
        host_limit_gib=config.cluster.node.host_memory_gib,
        step_time_s=step,
        tokens_per_s=config.training.global_batch * config.training.seq_len / step,
        samples_per_s=config.training.global_batch / step,
        mfu=found.time.model_flops / step / peak,
        hfu=found.time.hardware_flops / step / peak,
        bubble=found.time.bubble,
        usd_per_step=_price(config, step),
        band=NO_BAND,
        findings=tuple(findings),
        candidates=tuple(candidates),
        tables_sha256=tables.sha256(),
        plan_sha256=hashlib.sha256(to_json(plan).encode()).hexdigest(),
    )


def _price(config: RunConfig, step_s: float) -> float | None:
    price = config.cluster.price_per_gpu_hour
    return None if price is None else price * config.cluster.world_size * step_s / 3600


def _per_rank(
    config: RunConfig, by_name: Mapping[str, Case], per_stage: Mapping[str, Sequence[float]]
) -> dict[int, float]:
    """The sum over the components that a rank holds."""
    total = dict.fromkeys(range(config.cluster.world_size), 0.0)
    for name, case in by_name.items():
        for stage in range(case.layout.pp):
            for rank in case.layout.stage_ranks(stage):
                total[rank] += per_stage[name][stage]
    return total


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
    )  # fmt: skip


def _stage_predictions(found: Evaluated, name: str) -> tuple[StagePrediction, ...]:
    case = found.cases[name]
    return tuple(
        StagePrediction(
            stage=stage,
            memory_gib=found.memory[name][stage],
            host_gib_per_rank=memory.host_gib_per_rank(case, stage),
            time_s=found.time.stages[name][stage],
        )
        for stage in range(case.layout.pp)
    )


def _terms_on_rank(found: Evaluated) -> dict[str, float]:
    """The worst rank's memory by component and term, and the overhead; what is zero is left out."""
    terms: dict[str, float] = {"overhead": found.overhead_gib}
    for name, case in found.cases.items():
        for stage in range(case.layout.pp):
            if found.worst_rank in case.layout.stage_ranks(stage):
                row = vars(found.memory[name][stage])
                terms |= {f"{name}/{term}": v for term, v in row.items() if term != "total" and v > 0}
    return terms
