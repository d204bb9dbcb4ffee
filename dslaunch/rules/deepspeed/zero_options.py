"""Options of ZeRO that exclude each other, or do nothing where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit

_ONE_TWO = "deepspeed/runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__ 0.19.8, run"
_THREE = "deepspeed/runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.__init__ 0.19.8, run"
_STAGE3_ONLY = frozenset({
    "allgather_sequential", "gather_16bit_weights_on_model_save", "leaf_module", "max_live_parameters",
    "max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold",
    "param_persistence_threshold", "prefetch_bucket_size", "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size", "use_all_reduce_for_fetch_params", "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
})  # fmt: skip
_IDLE = (False, None, "none", "auto", "false", 0, 1)
"""Values that switch nothing on."""


@config_rule("zero.bucket-odd", severity="error", raised_by="deepspeed.initialize", evidence=_ONE_TWO)
def bucket_odd(config: Config) -> Iterator[Hit]:
    """An allgather_bucket_size that is odd, at stage 1 or 2."""
    key = f"{ZERO}.allgather_bucket_size"
    size = 1.0 if config.get(key) is True else config.number(key)
    if config.stage in (1, 2) and size is not None and size > 0 and size % 2 == 1:
        message = f"allgather_bucket_size {size:.0f} is odd; DeepSpeed asserts a multiple of 2."
        yield config.hit(f"{ZERO}.allgather_bucket_size", message, f"Write {size + 1:.0f}.")


@config_rule(
    "zero.reduce-scatter",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence=f"{_ONE_TWO}; {_THREE}",
)
def reduce_scatter(config: Config) -> Iterator[Hit]:
    """Scaling of gradients before the reduction, which reduce-scatter can't do at stage 2 and 3."""
    sums = str(config.get("gradient_allreduce_op")).lower() == "sum"
    if config.stage not in (2, 3) or config.off(f"{ZERO}.reduce_scatter") or sums:
        return
    fix = "Leave it out, or write reduce_scatter false."
    why = f"at ZeRO stage {config.stage} with reduce_scatter (true unless given): DeepSpeed asserts."
    if config.get("prescale_gradients"):
        yield config.hit("prescale_gradients", f"prescale_gradients {why}", fix)
    factor = _factor(config)
    if factor is not None and factor != 1:
        yield config.hit("gradient_predivide_factor", f"gradient_predivide_factor {factor:g} {why}", fix)


@config_rule(
    "zero.predivide", severity="error", raised_by="deepspeed.initialize",
    evidence=f"deepspeed/runtime/engine.py allreduce_bucket 0.19.8, run; {_ONE_TWO}",
)  # fmt: skip
def predivide(config: Config) -> Iterator[Hit]:
    """gradient_predivide_factor 0, by which gradients are divided before they are reduced."""
    sums = str(config.get("gradient_allreduce_op")).lower() == "sum"
    divided = config.stage == 0 or (config.stage in (1, 2) and config.off(f"{ZERO}.reduce_scatter"))
    if _factor(config) == 0 and divided and not sums and not config.get("prescale_gradients"):
        message = "gradient_predivide_factor 0: gradients are divided by it in the first step, ZeroDivisionError."
        yield config.hit("gradient_predivide_factor", message, "Leave it out: 1.0 divides nothing.")


def reads_factor(config: Config) -> bool:
    """Whether gradient_predivide_factor is read: not at stage 1 that scatters, nor with prescale_gradients."""
    scatters = not config.off(f"{ZERO}.reduce_scatter")
    compared = config.stage in (2, 3) and scatters
    if config.stage is None:
        return False
    return compared or not (config.get("prescale_gradients") or (config.stage == 1 and scatters))


def _factor(config: Config) -> float | None:
    """gradient_predivide_factor, of which false counts as 0 and true as 1."""
    value = config.get("gradient_predivide_factor")
    return float(value) if isinstance(value, bool) else config.number("gradient_predivide_factor")


@config_rule(
    "zero.grad-norm-needs",
    severity="error",
    raised_by="deepspeed.initialize",
    since="0.19.7",
    evidence=_ONE_TWO,
)
def grad_norm_needs(config: Config) -> Iterator[Hit]:
    """compute_grad_norm false beside what needs the norm."""
    if not (config.stage in (1, 2) and config.off(f"{ZERO}.compute_grad_norm")):
        return
    clip = config.number("gradient_clipping") if config.has("gradient_clipping") else 1.0
    wide = config.bf16 and config.get("data_types.grad_accum_dtype") in (
        "fp32",
        "float32",
        "float",
        "torch.float32",
    )
    offload = config.offload("optimizer")
    blockers = {
        f"gradient_clipping {clip or 0:g} (1.0 unless given)": clip is not None and clip > 0,
        f"offload_optimizer to {offload}": offload != "none",
        "zenflow": isinstance(config.get(f"{ZERO}.zenflow"), dict),
        "stage 1, bf16 and fp32 accumulation": config.stage == 1 and wide and offload == "none",
    }
    for blocker in (name for name, present in blockers.items() if present):
        message = f"compute_grad_norm false with {blocker}: DeepSpeed raises ValueError."
        yield config.hit(f"{ZERO}.compute_grad_norm", message, "Leave it out, or write gradient_clipping 0.")
        return


@config_rule(
    "zero.legacy", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/engine.py _configure_zero_optimizer, runtime/zero/stage3.py 0.19.8, run",
)  # fmt: skip
def legacy(config: Config) -> Iterator[Hit]:
    """Forms of ZeRO that DeepSpeed has given up."""
    if config.sharded and config.on(f"{ZERO}.legacy_stage1"):
        message = "legacy_stage1 true: DeepSpeed since 0.5.9 raises for it."
        yield config.hit(f"{ZERO}.legacy_stage1", message, "Delete it.")
    if config.stage == 3 and config.on(f"{ZERO}.elastic_checkpoint"):
        message = (
            "elastic_checkpoint at stage 3: a warning at start, NotImplementedError at the first checkpoint."
        )
        fix = "Delete it; a universal checkpoint changes the number of ranks."
        yield config.hit(
            f"{ZERO}.elastic_checkpoint", message, fix, severity="deprecated", raised_by="nobody"
        )


@config_rule(
    "zero.unused", severity="info",
    evidence="deepspeed/runtime/engine.py _configure_zero_optimizer, runtime/zero/config.py 0.19.8, run",
)  # fmt: skip
def unused(config: Config) -> Iterator[Hit]:
    """Options of ZeRO that the chosen stage doesn't read."""
    section = config.get(ZERO)
    if not isinstance(section, dict) or config.stage is None:
        return
    names = [name for name in section if _is_idle_at(config, name) and _switches(section[name])]
    if names:
        message = f"ZeRO stage {config.stage} doesn't read {', '.join(names)}: no effect, and no message."
        fix = "Delete them, or raise the stage." if config.stage < 3 else "Delete them."
        yield config.hit(f"{ZERO}.{names[0]}", message, fix)


def _is_idle_at(config: Config, name: str) -> bool:
    if name in ("stage", "offload_param", "cpu_offload_param", "legacy_stage1"):
        return False
    if config.stage == 3:
        return name == "round_robin_gradients"
    if config.stage == 0:
        return name not in ("offload_optimizer", "cpu_offload", "compute_grad_norm", "zenflow")
    return name.removeprefix("stage3_") in _STAGE3_ONLY or name in _STAGE3_ONLY


def _switches(value: object) -> bool:
    scalar = isinstance(value, int | float | str) or value is None
    return value is True or not scalar or value not in _IDLE


@config_rule(
    "zero.hpz", severity="error", raised_by="deepspeed.initialize", since="0.10.0",
    evidence="deepspeed/utils/groups.py _create_zero_param_parallel_group 0.19.8, run",
)  # fmt: skip
def hpz(config: Config) -> Iterator[Hit]:
    """A secondary partition (hpZ) that doesn't fit the ranks, or leaves the node."""
    key = f"{ZERO}.zero_hpz_partition_size"
    size, world = config.number(key), config.world
    if config.stage != 3 or size is None or size <= 1 or world is None:
        return
    per_node = config.plan.cluster.gpus_per_node if config.plan else config.settings.ranks_per_node
    fix = f"Write the GPUs of a node{f', {per_node}' if per_node else ''}."
    if size > world:
        message = (
            f"zero_hpz_partition_size {size:g} for {world} ranks: DeepSpeed takes {world} without a word."
        )
        yield config.hit(key, message, fix, severity="wrong", raised_by="nobody")
    elif world % size:
        yield config.hit(
            key, f"zero_hpz_partition_size {size:g} doesn't divide {world} ranks: DeepSpeed asserts.", fix
        )
    elif per_node and size != per_node:
        message = (
            f"zero_hpz_partition_size {size:g} with {per_node} ranks a node: the second copy "
            "is no node's own."
        )
        yield config.hit(key, message, fix, severity="slow", raised_by="nobody")


@config_rule(
    "zero.quantized", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/torch_autocast.py, runtime/zero/stage3.py, utils/groups.py "
    "_get_local_all_to_all_group 0.19.8, run",
)  # fmt: skip
def quantized(config: Config) -> Iterator[Hit]:
    """Quantized weights or gradients (ZeRO++) with what they can't be combined with."""
    weights, gradients = f"{ZERO}.zero_quantized_weights", f"{ZERO}.zero_quantized_gradients"
    if config.on(weights) and config.get("torch_autocast.enabled") is True:
        message = "zero_quantized_weights with torch_autocast: DeepSpeed asserts that one of them is off."
        yield config.hit(weights, message, "Use bf16 instead of torch_autocast, or no quantized weights.")
    if config.stage != 3:
        return
    if config.on(gradients) and config.off(f"{ZERO}.reduce_scatter"):
        message = "zero_quantized_gradients with reduce_scatter false: DeepSpeed asserts that it is on."
        yield config.hit(gradients, message, "Delete reduce_scatter.")
    if config.on(gradients) and (message := _uneven_nodes(config)):
        yield config.hit(gradients, message, "Use whole nodes of the same size, or leave it out.")
    frozen = f"{ZERO}.zero_quantized_nontrainable_weights"
    if config.on(frozen) and not config.fp16 and config.get("fp16.enabled") != "auto":
        message = f"zero_quantized_nontrainable_weights with {config.precision}: its kernel asserts float16."
        yield config.hit(frozen, message, "Use fp16, or leave frozen weights as they are.")


def _uneven_nodes(config: Config) -> str:
    """What qgZ's groups of a node's devices make of ranks that don't fill them; empty where they do."""
    world, held = config.world, config.settings.ranks_per_node
    if world is None or held is None or world < held or world % held == 0:
        return ""
    effect = "DeepSpeed asserts equality" if world < 2 * held else "the last ranks are in no group"
    return f"zero_quantized_gradients over {world} ranks on nodes of {held} devices: {effect}."


@config_rule(
    "zero.unused-parameters", severity="info",
    evidence="deepspeed/runtime/zero/stage_1_and_2.py, runtime/zero/config.py 0.19.8",
)  # fmt: skip
def unused_parameters(config: Config) -> Iterator[Hit]:
    """ignore_unused_parameters false, which raises where a parameter gets no gradient."""
    key = f"{ZERO}.ignore_unused_parameters"
    if config.stage == 2 and config.off(key):
        message = (
            f"ignore_unused_parameters {shown(config.get(key))}: a step in which a parameter "
            "gets no gradient raises."
        )
        yield config.hit(key, message, "Leave it out where a branch or a tower isn't called in each step.")


@config_rule(
    "zero.save", severity="info",
    evidence="deepspeed/runtime/engine.py save_16bit_model 0.19.8; DeepSpeed#2413; huggingface/peft#453",
)  # fmt: skip
def save(config: Config) -> Iterator[Hit]:
    """ZeRO-3 under Hugging Face without gathered weights at saving."""
    names = [f"{ZERO}.{prefix}gather_16bit_weights_on_model_save" for prefix in ("stage3_", "")]
    if config.settings.huggingface and config.stage == 3 and not any(config.on(name) or config.get(name) == "auto"
                                                                     for name in names):  # fmt: skip
        message = (
            "stage3_gather_16bit_weights_on_model_save is off: what the Trainer saves holds no whole weights."
        )
        fix = "Write true (each save gathers them), or convert afterwards with zero_to_fp32.py."
        yield config.hit(f"{ZERO}.stage3_gather_16bit_weights_on_model_save", message, fix)


@config_rule(
    "zero.accumulation", severity="error", raised_by="deepspeed.initialize", since="0.19.4",
    evidence="deepspeed/runtime/engine.py _do_sanity_check 0.19.8, run",
)  # fmt: skip
def managed(config: Config) -> Iterator[Hit]:
    """managed_gradient_accumulation false with what needs DeepSpeed to count the steps."""
    if config.get("managed_gradient_accumulation") is not False:
        return
    blockers = {
        "overlap_comm below stage 2": config.on(f"{ZERO}.overlap_comm") and config.stage in (0, 1),
        "a pipeline": config.stages > 1,
        "compile.deepcompile": config.on("compile.deepcompile") and config.sharded,
    }
    for blocker in (name for name, present in blockers.items() if present):
        message = f"managed_gradient_accumulation false with {blocker}: DeepSpeed asserts."
        yield config.hit("managed_gradient_accumulation", message, "Leave it out.")
