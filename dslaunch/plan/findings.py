"""What a plan says of itself: memory against its limits, and choices that were made aloud."""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.engines.base import Engine
from dslaunch.plan.decisions import RUNTIME
from dslaunch.plan.deepspeed_findings import MEMORY_NVME, by_script, nvme_gib, nvme_memory
from dslaunch.plan.evaluate import Evaluated
from dslaunch.planfile import Finding
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder

MEMORY_GPU = "memory.gpu"
MEMORY_HOST = "memory.host"
REFUSING = (MEMORY_GPU, MEMORY_HOST, MEMORY_NVME)


def limit_gib(config: RunConfig) -> float:
    """GPU memory that a plan may use."""
    return config.cluster.gpu.memory_gib * config.goal.memory_fraction


def fits(config: RunConfig, found: Evaluated) -> bool:
    """Whether GPU and host memory, and NVMe, hold the plan."""
    node = config.cluster.node
    in_memory = found.peak_gib <= limit_gib(config) and found.host_gib <= node.host_memory_gib
    return in_memory and nvme_gib(config, found) <= node.nvme_gib


def largest_terms(found: Evaluated) -> list[tuple[str, float]]:
    """(component stage/term, GiB) of the worst rank, largest first."""
    terms = [("overhead", found.overhead_gib)]
    for name, case in found.cases.items():
        for stage in range(case.layout.pp):
            if found.worst_rank in case.layout.stage_ranks(stage):
                where = f"{name} stage {stage}" if case.layout.pp > 1 else name
                row = vars(found.memory[name][stage])
                terms += [
                    (f"{where} {term}", gib) for term, gib in row.items() if term != "total" and gib >= 0.05
                ]
    return sorted(terms, key=lambda term: -term[1])


def findings(config: RunConfig, engine: Engine, found: Evaluated, remedies: Sequence[str]) -> list[Finding]:
    """Every finding of the plan itself; those of the rendered files come from the rules."""
    return [
        *_gpu_memory(config, found, remedies),
        *_host_memory(config, found),
        *nvme_memory(config, found),
        *_choices(config, engine, found),
    ]


def _gpu_memory(config: RunConfig, found: Evaluated, remedies: Sequence[str]) -> list[Finding]:
    limit, capacity = limit_gib(config), config.cluster.gpu.memory_gib
    if found.peak_gib <= limit:
        return []
    terms = ", ".join(f"{term} {gib:.1f}" for term, gib in largest_terms(found)[:5])
    fix = (
        "what would fit: " + "; ".join(remedies) if remedies else "no single change that was tried would fit"
    )
    return [
        Finding(
            rule=MEMORY_GPU,
            severity="error",
            message=(
                f"does not fit: rank {found.worst_rank} needs {found.peak_gib:.1f} of {limit:.1f} GiB "
                f"({config.goal.memory_fraction:g} of {capacity:g}): {terms}"
            ),
            where="goal.memory_fraction",
            fix=fix,
        )
    ]


def _host_memory(config: RunConfig, found: Evaluated) -> list[Finding]:
    have = config.cluster.node.host_memory_gib
    if found.host_gib <= have:
        return []
    return [
        Finding(
            rule=MEMORY_HOST,
            severity="error",
            message=f"does not fit: a node needs {found.host_gib:.0f} of {have:.0f} GiB of host memory",
            where="cluster.node.host_memory_gib",
            fix="use more nodes, or take offload away",
        )
    ]


def _choices(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    return [
        *_grad_accum_choice(config, found),
        *_recompute_by_script(engine, found),
        *by_script(config, engine, found),
        *_selective_recompute(found),
        *_long_sequence(config),
        *_no_program(config, engine),
        *_not_executed_yet(config, engine),
        *_rates_by_script(config, engine, found),
        *_few_microbatches(found),
    ]


def _grad_accum_choice(config: RunConfig, found: Evaluated) -> list[Finding]:
    case = found.cases[config.model.trunk]
    if config.training.grad_accum_dtype is not None or case.grad_accum_dtype == config.training.precision:
        return []
    if config.training.precision == "fp32" or config.strategy.sharding != "zero":
        return []
    return [
        Finding(
            rule="training.grad-accum",
            severity="info",
            message=(
                f"gradients of {case.layout.num_microbatches} micro-batches are accumulated in "
                f"{case.grad_accum_dtype}: safer, and larger than {config.training.precision}"
            ),
            where="training.grad_accum_dtype",
            fix=f"training.grad_accum_dtype={config.training.precision} takes less memory",
        )
    ]


def _recompute_by_script(engine: Engine, found: Evaluated) -> list[Finding]:
    names = [name for name, case in found.cases.items() if case.layout.recompute != "none"]
    if engine.name not in ("deepspeed", "torch") or not names:
        return []
    return [
        Finding(
            rule="recompute.script",
            severity="info",
            message=f"recompute of {', '.join(names)} is the script's to do; {engine.name} has no key for it",
            where=f"strategy.{names[0]}.recompute",
            fix="turn on gradient checkpointing in the script, such as model.gradient_checkpointing_enable()",
        )
    ]


def _selective_recompute(found: Evaluated) -> list[Finding]:
    names = [name for name, case in found.cases.items() if case.layout.recompute == "selective"]
    if not names:
        return []
    return [
        Finding(
            rule="recompute.selective",
            severity="info",
            message=(
                f"{', '.join(names)}: selective recompute runs attention's core twice, and with a fused attention "
                "kernel saves only its softmax statistics, 4 bytes a token and head"
            ),
            where=f"strategy.{names[0]}.recompute",
            fix="recompute=none is faster where attention is fused; recompute=full saves memory",
        )
    ]


def _long_sequence(config: RunConfig) -> list[Finding]:
    trunk = config.model.components[config.model.trunk]
    if not isinstance(trunk, Decoder) or config.training.seq_len <= trunk.max_positions:
        return []
    return [
        Finding(
            rule="model.positions",
            severity="wrong",
            message=(
                f"sequences of {config.training.seq_len} tokens; {config.model.name} was made for "
                f"{trunk.max_positions}"
            ),
            where="training.seq_len",
            fix=f"training.seq_len={trunk.max_positions}, or a model file with another max_positions",
        )
    ]


def _no_program(config: RunConfig, engine: Engine) -> list[Finding]:
    if config.script or config.module or engine.name in ("native", "megatron", "megatron_deepspeed"):
        return []
    return [
        Finding(
            rule="program.missing",
            severity="info",
            message=f"no program: {engine.name} runs a script of yours, and none is named",
            where="script",
            fix="script=train.py -- --its --own args",
        )
    ]


def _rates_by_script(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    """One engine has one learning rate; its parameter groups are the program's to make."""
    optimizer = config.training.optimizer
    own = {
        name: case.component.lr or optimizer.lr
        for name, case in found.cases.items()
        if not case.frozen and (case.component.lr or optimizer.lr) != optimizer.lr
    }
    if not own or engine.per_component or config.module == RUNTIME:
        return []
    shown = ", ".join(f"{name} {rate:g}" for name, rate in own.items())
    return [
        Finding(
            rule="learning-rate.script",
            severity="info",
            message=(
                f"learning rates of their own ({shown}; the rest {optimizer.lr:g}) are in plan.json alone: "
                f"{engine.name} has one for the whole model"
            ),
            where=f"model.components.{next(iter(own))}.lr",
            fix="let the script make a parameter group for each component, from plan.json (DSLAUNCH_PLAN)",
        )
    ]


def _not_executed_yet(config: RunConfig, engine: Engine) -> list[Finding]:
    if engine.name != "native" or config.script or config.module not in ("", RUNTIME):
        return []
    return [
        Finding(
            rule="runtime.native",
            severity="info",
            message=(
                "dslaunch.runtime does not execute a layout per component yet: this plan is rendered, not launched"
            ),
            where="engine.name",
            fix="script=FILE launches a program of yours; strategy=zero3 is one layout for the whole model",
        )
    ]


def _few_microbatches(found: Evaluated) -> list[Finding]:
    return [
        Finding(
            rule="pipeline.bubble",
            severity="slow",
            message=(
                f"{name}: {layout.num_microbatches} micro-batches in {layout.pp} stages idle "
                f"{(layout.pp - 1) / (layout.num_microbatches * layout.vpp + layout.pp - 1):.0%} of the time"
            ),
            where=f"strategy.{name}.pp",
            fix=f"at least {4 * layout.pp} micro-batches: a larger training.global_batch, or fewer stages",
        )
        for name, layout in ((name, case.layout) for name, case in found.cases.items())
        if layout.pp > 1 and layout.num_microbatches < 4 * layout.pp
    ]
