"""Pipelines, and activation checkpointing, as a DeepSpeed JSON sets them."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit

_PIPE = "deepspeed/runtime/pipe/engine.py, runtime/engine.py 0.19.8, run"
_CHECKPOINTING = "deepspeed/runtime/activation_checkpointing/checkpointing.py configure 0.19.8"


@config_rule(
    "pipeline.world", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/pipe/module.py PipelineModule.__init__ 0.19.8, run",
)  # fmt: skip
def world(config: Config) -> Iterator[Hit]:
    """Stages that don't divide the ranks."""
    if config.plan is None and config.world and config.stages > 1 and config.world % config.stages:
        message = (
            f"{config.stages} stages don't divide {config.world} ranks: PipelineModule raises RuntimeError."
        )
        yield config.hit("pipeline", message, "Choose stages whose number divides that of the ranks.")


@config_rule("pipeline.micro-batches", severity="slow", evidence="deepspeed/runtime/pipe/schedule.py 0.19.8")
def micro_batches(config: Config) -> Iterator[Hit]:
    """Fewer micro-batches than stages."""
    steps = config.number("gradient_accumulation_steps")
    if config.plan is None and config.stages > 1 and steps is not None and 0 < steps < config.stages:
        idle = (config.stages - 1) / (steps + config.stages - 1)
        message = f"{steps:g} micro-batches in {config.stages} stages: {idle:.0%} of the time is idle."
        yield config.hit("gradient_accumulation_steps", message, f"Use {4 * config.stages} or more.")


@config_rule("pipeline.options", severity="info", evidence=_PIPE)
def options(config: Config) -> Iterator[Hit]:
    """Options that a pipeline switches off, or that are unsafe in it."""
    if config.stages < 2 or config.plan is not None:
        return
    if config.on(f"{ZERO}.overlap_comm"):
        message = "overlap_comm under a pipeline: DeepSpeed warns, and switches it off."
        yield config.hit(f"{ZERO}.overlap_comm", message, "Leave it out.")
    if config.bf16 and config.stage == 0:
        message = "bf16 in a pipeline at ZeRO stage 0 adds the micro-batches' gradients in bf16."
        fix = 'Use ZeRO stage 1 and "data_types": {"grad_accum_dtype": "fp32"}.'
        yield config.hit(config.bf16_section, message, fix)
    size = config.number("tensor_parallel.autotp_size")
    if size is not None and size > 1:
        message = "AutoTP under a pipeline is not checked: the replicas are no longer world / (pp * tp)."
        fix = "Give the topology a model axis instead."
        yield config.hit("tensor_parallel.autotp_size", message, fix, severity="wrong")


@config_rule(
    "pipeline.timers", severity="error", raised_by="deepspeed.initialize", since="0.18.9",
    evidence="deepspeed/runtime/pipe/engine.py _exec_backward_pass, engine.py _backward_prologue 0.18.9, "
    "0.19.8, run",
)  # fmt: skip
def timers(config: Config) -> Iterator[Hit]:
    """Timers of the backward pass under a pipeline: its first micro-batch raises."""
    if config.stages < 2:
        return
    for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if config.on(key):
            message = (
                f"{key} under a pipeline: every stage but the last starts the timer of its backward pass twice, "
                "and DeepSpeed asserts in the first step."
            )
            yield config.hit(
                key, message, "Switch it off; time a job without a pipeline, or use torch.profiler."
            )


@config_rule(
    "pipeline.autocast", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/engine.py _take_model_step, runtime/pipe/engine.py _exec_backward_pass "
    "0.19.8, run",
)  # fmt: skip
def autocast(config: Config) -> Iterator[Hit]:
    """torch_autocast in float16 under a pipeline, whose earlier stages never scale a loss."""
    half = config.get("torch_autocast.dtype") in ("fp16", "float16", "half", "torch.float16")
    if config.stages > 1 and config.get("torch_autocast.enabled") and half:
        message = (
            "torch_autocast in fp16 keeps a GradScaler on each stage, and only the last one has a loss to scale: "
            "the others assert in the first step."
        )
        yield config.hit("torch_autocast.dtype", message, "Write bf16, or use the fp16 section instead.")


@config_rule("activation.contiguous", severity="error", evidence=_CHECKPOINTING)
def contiguous(config: Config) -> Iterator[Hit]:
    """Contiguous checkpoints without what they need."""
    key = "activation_checkpointing.contiguous_memory_optimization"
    if not config.get(key):
        return
    for need in ("partition_activations", "number_checkpoints"):
        if not config.get(f"activation_checkpointing.{need}"):
            message = (
                f"contiguous_memory_optimization without {need}: "
                "deepspeed.checkpointing.configure asserts it."
            )
            value = "the number of checkpointed layers" if need == "number_checkpoints" else "true"
            yield config.hit(key, message, f"Give {need}: {value}, or delete contiguous_memory_optimization.")


@config_rule("activation.partition", severity="info", evidence=f"{_CHECKPOINTING}; DeepSpeed#598, #1080")
def partition(config: Config) -> Iterator[Hit]:
    """Activations to be cut over tensor-parallel ranks where there are none."""
    key = "activation_checkpointing.partition_activations"
    cut = config.number("tensor_parallel.autotp_size") or config.settings.tp or 1
    if config.get(key) and config.plan is None and cut <= 1:
        message = (
            "partition_activations cuts checkpoints over tensor-parallel ranks; no tensor "
            "parallelism is known of."
        )
        yield config.hit(
            key, message, "Delete it, or give --tp where the script's mpu has tensor parallelism."
        )
