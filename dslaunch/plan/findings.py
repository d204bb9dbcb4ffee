"""What a plan says of itself: memory against its limits, and choices that were made aloud."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.plan import host_memory
from dslaunch.plan.decisions import RUNTIME
from dslaunch.plan.deepspeed_findings import MEMORY_NVME, by_script, nvme_gib, nvme_memory
from dslaunch.plan.evaluate import Evaluated
from dslaunch.plan.memory import loading_gib_per_node
from dslaunch.plan.schedules import SPLIT
from dslaunch.planfile import Band, Finding
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
    for name, stage in found.on_worst_rank():
        where = f"{name} stage {stage}" if found.cases[name].layout.pp > 1 else name
        row = vars(found.memory[name][stage])
        terms += [(f"{where} {term}", gib) for term, gib in row.items() if term != "total" and gib >= 0.05]
    return sorted(terms, key=lambda term: -term[1])


def findings(
    config: RunConfig, engine: Engine, found: Evaluated, band: Band | None, remedies: Sequence[str]
) -> list[Finding]:
    """Every finding of the plan itself; those of the rendered files come from the rules.

    Args:
        band: the error band of the memory ledger, where one is known.
    """
    return [
        *_gpu_memory(config, found, band or Band(1.0, 1.0), remedies),
        *_host_memory(config, found),
        *_while_loading(config, engine, found),
        *nvme_memory(config, found),
        *_choices(config, engine, found),
    ]


def _gpu_memory(config: RunConfig, found: Evaluated, band: Band, remedies: Sequence[str]) -> list[Finding]:
    """Refused where no error that the band allows lets it fit; a warning where some do and some do not."""
    limit, capacity = limit_gib(config), config.cluster.gpu.memory_gib
    low, high = found.peak_gib * band.low, found.peak_gib * band.high
    if high <= limit:
        return []
    terms = ", ".join(f"{term} {gib:.1f}" for term, gib in largest_terms(found)[:5])
    fix = (
        "what would fit: " + "; ".join(remedies) if remedies else "no single change that was tried would fit"
    )
    figures = (
        f"rank {found.worst_rank} needs {found.peak_gib:.1f} of {limit:.1f} GiB "
        f"({config.goal.memory_fraction:g} of {capacity:g}): {terms}"
    )
    if low > limit:
        return [Finding(MEMORY_GPU, "error", f"does not fit: {figures}", "goal.memory_fraction", fix)]
    message = f"may not fit: {low:.1f} to {high:.1f} GiB by the ledger's error band; {figures}"
    fix = f"--accept {MEMORY_GPU}, or " + (
        fix if remedies else "goal.memory_fraction=1 where nothing else runs"
    )
    return [Finding(MEMORY_GPU, "memory", message, "goal.memory_fraction", fix)]


def _host_memory(config: RunConfig, found: Evaluated) -> list[Finding]:
    have = config.cluster.node.host_memory_gib
    if found.host_gib <= have:
        return []
    away = "set checkpoint.async=false" if config.checkpoint.in_background else "take offload away"
    if any(host_memory.wastes(case) for case in found.cases.values()):
        away += f", or set engine.extra.{host_memory.PIN}=false: {host_memory.WHY}"
    return [
        Finding(
            rule=MEMORY_HOST,
            severity="error",
            message=f"does not fit: a node needs {found.host_gib:.0f} of {have:.0f} GiB of host memory",
            where="cluster.node.host_memory_gib",
            fix=f"use more nodes, or {away}",
        )
    ]


def loading_gib(config: RunConfig, engine: Engine, found: Evaluated) -> float | None:
    """Host memory of a node while each of its processes has the whole model; None where none has.

    Scripts of the user's load the model in every process, unless accelerate's FSDP or transformers under ZeRO-3
    does it for them. dslaunch.runtime reads slices, and Megatron makes its weights on the GPU.
    """
    own = engine.name in ("deepspeed", "torch") and config.module != RUNTIME
    told = config.engine.accelerate or (config.engine.huggingface and found.trunk.layout.zero == 3)
    if not own or told or config.cluster.gpu.accelerator == "cpu":
        return None
    return loading_gib_per_node(found.cases, config.cluster.slots)


def _while_loading(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    node, copies = config.cluster.node, loading_gib(config, engine, found)
    if copies is None or copies <= node.host_memory_gib:
        return []
    each = f"{config.cluster.slots} processes of a node with a whole copy of the model each"
    return [
        Finding(
            rule=MEMORY_HOST,
            severity="memory",
            message=f"may not fit while loading: {each} take {copies:.0f} of {node.host_memory_gib:.0f} GiB",
            where="cluster.node.host_memory_gib",
            fix=(
                "let the script make the model under deepspeed.zero.Init (transformers: HfDeepSpeedConfig), on "
                "the meta device, or read weights on one process of a node"
            ),
        )
    ]


def chosen_freely(config: RunConfig, found: Evaluated) -> list[Finding]:
    """A micro-batch of the trunk's other than training.micro_batch, which a search does not take for a pin."""
    name, given = config.model.trunk, config.training.micro_batch
    taken = found.cases[name].layout.micro_batch
    if given in (None, taken):
        return []
    return [
        Finding(
            rule="search.micro-batch",
            severity="info",
            message=f"training.micro_batch is {given}; strategy=auto searched it, and takes {taken} for {name}",
            where="training.micro_batch",
            fix=f"strategy.every.micro_batch={given} pins it",
        )
    ]


def _choices(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    return [
        *_grad_accum_choice(config, found),
        *_recompute_by_script(config, engine, found),
        *by_script(config, engine, found),
        *_selective_recompute(found),
        *_long_sequence(config),
        *_no_program(config, engine),
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


def _recompute_by_script(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    names = [name for name, case in found.cases.items() if case.layout.recompute != "none"]
    if engine.name not in ("deepspeed", "torch") or not names or config.module == RUNTIME:
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


def _idle(found: Evaluated, layout: Layout) -> float:
    """Share of the time in which equal stages idle; by the ledger of time where the backward pass is split."""
    if found.trunk.config.training.schedule in SPLIT:
        return found.time.bubble
    passes = layout.num_microbatches * layout.vpp // found.trunk.config.training.macro_batches
    return (layout.pp - 1) / (passes + layout.pp - 1)


def _few_microbatches(found: Evaluated) -> list[Finding]:
    return [
        Finding(
            rule="pipeline.bubble",
            severity="slow",
            message=(
                f"{name}: {layout.num_microbatches} micro-batches in {layout.pp} stages idle "
                f"{_idle(found, layout):.0%} of the time"
            ),
            where=f"strategy.{name}.pp",
            fix=(
                f"at least {math.ceil(4 * layout.pp / layout.vpp)} micro-batches: a larger "
                "training.global_batch, or fewer stages"
            ),
        )
        for name, layout in ((name, case.layout) for name, case in found.cases.items())
        if layout.pp > 1 and layout.num_microbatches * layout.vpp < 4 * layout.pp
    ]
