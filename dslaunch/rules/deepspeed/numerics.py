"""Types of weights, gradients and messages, and what is clipped."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit

_ENGINE = "deepspeed/runtime/engine.py 0.19.8, run"
_NAMES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("int8", "torch.int8"), "int8"),
}
"""What DeepSpeed calls a type: deepspeed/runtime/config.py DtypeEnum, 0.19.8."""
_DTYPE = "torch_autocast.dtype"
_MANY_STEPS = 16
"""Accumulation steps from which bf16's 8 bits of precision lose gradients: a sum of 16 takes 4 of them."""


@config_rule(
    "precision.master-offload", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/base_optimizer.py _configure_master_weights 0.19.8, run",
)  # fmt: skip
def master_offload(config: Config) -> Iterator[Hit]:
    """16-bit master weights without optimizer states on the CPU."""
    bf16 = config.bf16_section
    half, brain = "fp16.fp16_master_weights_and_grads", f"{bf16}.bf16_master_weights_and_grads"
    if not config.sharded:
        return
    if config.on(half) and config.on(brain):
        message = "16-bit master weights for both fp16 and bf16: DeepSpeed asserts that one is off."
        yield config.hit(half, message, "Keep that of the type in use.")
        return
    plain = config.optimizer in ("", "adam", "adamw") and not config.get("optimizer.params.torch_adam")
    on_cpu = config.offload("optimizer") != "none"
    states = config.on(f"{bf16}.bf16_optimizer_states")
    for key in (key for key in (half, brain) if config.on(key)):
        if key == brain and states and not on_cpu:
            continue
        if not (on_cpu and plain):
            message = f"{key} without optimizer offload and DeepSpeed's CPU Adam: DeepSpeed asserts both."
            fix = "Offload the optimizer to the CPU, or switch it off." + (_STATES if key == brain else "")
            yield config.hit(key, message, fix)


_STATES = " bf16_optimizer_states beside it keeps all on the GPU."


@config_rule("precision.accumulation", severity="error", raised_by="deepspeed.initialize", evidence=_ENGINE)
def accumulation(config: Config) -> Iterator[Hit]:
    """Types of gradient accumulation that the engine can't keep, or that lose gradients."""
    key = "data_types.grad_accum_dtype"
    wanted = config.get(key)
    if wanted is not None and not (isinstance(wanted, str) and wanted in _NAMES):
        return
    other = wanted is not None and _NAMES[wanted] != config.precision and not config.precision_open
    if config.stage == 0 and other and (config.optimizer or config.hands("optimizer", 2)):
        message = f"grad_accum_dtype {wanted} with {config.precision} at ZeRO stage 0: NotImplementedError."
        yield config.hit(key, message, "Use ZeRO stage 1, 2 or 3, or leave grad_accum_dtype out.")
    if config.stage == 1 and other and _NAMES.get(str(wanted)) == "int8":
        message = f"grad_accum_dtype {wanted} at ZeRO stage 1: gradients can't be added in it, RuntimeError."
        yield config.hit(key, message, "Write fp32, or leave it out.")
    steps = config.number("gradient_accumulation_steps")
    if wanted is None and config.bf16 and steps is not None and steps >= _MANY_STEPS:
        message = f"{steps:g} accumulation steps are added in bf16, which has 8 bits of precision."
        fix = 'Write "data_types": {"grad_accum_dtype": "fp32"} at ZeRO 1 to 3.'
        yield config.hit("gradient_accumulation_steps", message, fix, severity="info", raised_by="nobody")


@config_rule(
    "precision.bf16-optimizer", severity="info",
    evidence="deepspeed/runtime/engine.py _do_optimizer_sanity_check, runtime/bf16_optimizer.py 0.19.8, run",
)  # fmt: skip
def bf16_optimizer(config: Config) -> Iterator[Hit]:
    """Options of ZeRO beside bf16, stage 1 and fp32 accumulation, where another optimizer than ZeRO's runs."""
    summed = _NAMES.get(str(config.get("data_types.grad_accum_dtype")))
    alone = config.stage == 1 and config.offload("optimizer") == "none" and config.plan is None
    other = alone and config.bf16 and summed == "fp32"
    for name in ("overlap_comm", "round_robin_gradients", "zenflow") if other else ():
        if config.get(f"{ZERO}.{name}") not in (None, False, "auto"):
            message = (
                f"{name} isn't read: with bf16, stage 1 and fp32 accumulation BF16_Optimizer takes the place of "
                "ZeRO's, with checkpoints of its own."
            )
            yield config.hit(f"{ZERO}.{name}", message, "Leave it out, or use ZeRO stage 2.")


@config_rule(
    "precision.param-dtype",
    severity="error",
    raised_by="deepspeed.initialize",
    since="0.19.2",
    evidence=_ENGINE,
)
def param_dtype(config: Config) -> Iterator[Hit]:
    """data_types.param_dtype that isn't the type in use."""
    wanted = _NAMES.get(str(config.get("data_types.param_dtype")))
    if wanted is not None and wanted != config.precision and not config.precision_open:
        message = (
            f"param_dtype {wanted}, but the model is in {config.precision}: DeepSpeed asserts "
            "that they agree."
        )
        yield config.hit("data_types.param_dtype", message, f"Leave it out, or enable {wanted}.")


@config_rule("precision.reduce-dtype", severity="wrong", evidence=_ENGINE)
def reduce_dtype(config: Config) -> Iterator[Hit]:
    """Gradients reduced in fp16 without fp16's loss scale."""
    kind = str(config.get("communication_data_type")).lower()
    if kind == "fp16" and not config.fp16 and config.get("fp16.enabled") != "auto":
        message = (
            f"communication_data_type fp16 with {config.precision}: gradients above 65504 become infinite."
        )
        yield config.hit("communication_data_type", message, "Write bf16 or fp32, or leave it out.")


@config_rule(
    "precision.autocast", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/torch_autocast.py init_autocast_params, runtime/engine.py 0.19.8, run",
)  # fmt: skip
def autocast(config: Config) -> Iterator[Hit]:
    """torch_autocast without a type, beside bf16 or fp16, or with modules that can't be found."""
    if not config.get("torch_autocast.enabled"):
        return
    modules = config.get("torch_autocast.lower_precision_safe_modules")
    for name in modules if isinstance(modules, list) else ():
        if isinstance(name, str) and "." not in name:
            key = "torch_autocast.lower_precision_safe_modules"
            yield config.hit(key, f"{name!r} names no package: ValueError.", "Write it as torch.nn.Linear.")
    if _NAMES.get(str(config.get(_DTYPE))) == "int8":
        yield _whole(config)
    if not config.has(_DTYPE):
        message = "torch_autocast without dtype: torch's own default for the device is taken."
        yield config.hit(
            "torch_autocast", message, 'Write "dtype": "bf16".', severity="wrong", raised_by="nobody"
        )
    scaled = config.stage == 0 and config.stages == 1 and _NAMES.get(str(config.get(_DTYPE))) == "fp16"
    if config.precision != "fp32" and scaled:
        message = (
            f"torch_autocast in fp16 beside {config.precision} at ZeRO stage 0: its GradScaler finds no gradients "
            "at the optimizer of the fp32 weights, and asserts in the first step."
        )
        yield config.hit(_DTYPE, message, f"Keep {config.precision} or torch_autocast, not both.")
    elif config.precision != "fp32":
        message = f"torch_autocast beside {config.precision}: weights are cast, and autocast runs on top."
        yield config.hit(
            "torch_autocast.enabled", message, "Choose one.", severity="info", raised_by="nobody"
        )


def _whole(config: Config) -> Hit:
    """int8, which autocast has no operators for."""
    fix = "Write bf16."
    if config.stage == 3:
        message = "torch_autocast in int8 at ZeRO stage 3: gradients can't be reduced in it, RuntimeError."
        return config.hit(_DTYPE, message, fix)
    message = "torch_autocast in int8: torch warns that it can't, and casts nothing."
    return config.hit(_DTYPE, message, fix, severity="wrong", raised_by="nobody")


@config_rule(
    "precision.auto-cast", severity="wrong",
    evidence="deepspeed/runtime/engine.py _forward_prologue, _cast_inputs_half 0.19.8, run",
)  # fmt: skip
def auto_cast(config: Config) -> Iterator[Hit]:
    """fp16.auto_cast without fp16: inputs are cast to float16, and the weights aren't."""
    half = config.fp16 or config.precision_open or config.get("torch_autocast.enabled")
    if config.on("fp16.auto_cast") and not half:
        message = (
            f"auto_cast without fp16 turns floating inputs into float16, and the weights are {config.precision}: "
            "the first layer that gets them raises RuntimeError, and token ids alone pass."
        )
        yield config.hit("fp16.auto_cast", message, "Delete it, or enable fp16.")


@config_rule(
    "version.defaults", severity="info", since="0.19.3",
    evidence="deepspeed/runtime/constants.py, zero/offload_config.py 0.19.8, run; DeepSpeed#8068, #8035, #8207",
)  # fmt: skip
def defaults(config: Config) -> Iterator[Hit]:
    """Settings that are left to a default which DeepSpeed has changed."""
    found: list[tuple[str, str]] = []
    if config.optimizer and not config.has("gradient_clipping"):
        found.append(("optimizer", "gradient_clipping is 1.0 since 0.19.3 (before: off)"))
    if config.bf16 and config.optimizer and not config.has(f"{config.bf16_section}.check_grad_overflow"):
        said = "bf16.check_grad_overflow skips steps with inf or nan since 0.19.3 (before: applied)"
        found.append((config.bf16_section, said))
    for name in ("optimizer", "param"):
        key = f"{ZERO}.offload_{name}"
        used = config.stage == 3 or (name == "optimizer" and config.sharded)
        if used and config.at_least("0.19.5") and _pins_by_default(config, name):
            found.append((key, f"{key}.pin_memory is true since 0.19.5 (before: false)"))
    if found:
        message = f"left to a default that changed: {'; '.join(said for _, said in found)}."
        yield config.hit(found[0][0], message, "Write the value that is meant.")


def _pins_by_default(config: Config, name: str) -> bool:
    key = f"{ZERO}.offload_{name}"
    return config.offload(name) != "none" and config.has(key) and not config.has(f"{key}.pin_memory")
