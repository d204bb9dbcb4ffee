"""What DeepSpeed's learning-rate schedules take, and which rate wins."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import listed, nearest
from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.deepspeed.torch_arguments import SCHEDULES
from dslaunch.rules.registry import Hit

_ENGINE = "deepspeed/runtime/engine.py _scheduler_from_config 0.19.8, run"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py 0.19.8, run"
TORCH = frozenset({
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LambdaLR",
    "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
    "SequentialLR", "StepLR",
})  # fmt: skip
"""torch.optim.lr_scheduler's (2.13)."""

def schedule(config: Config) -> str:
    """The schedule's name; empty where none is named."""
    name = config.get("scheduler.type")
    return name if isinstance(name, str) else ""


@config_rule("scheduler.type", severity="error", raised_by="deepspeed.initialize", evidence=_ENGINE)
def unknown_type(config: Config) -> Iterator[Hit]:
    """A schedule that neither DeepSpeed nor torch has under this name."""
    name = schedule(config)
    if name and name not in SCHEDULES and name not in TORCH:
        message = f"no schedule is called {name!r}; DeepSpeed asserts at start-up.{nearest(name, SCHEDULES)}"
        yield config.hit("scheduler.type", message, f"Use {listed(SCHEDULES)}; capitals count.")


@config_rule("scheduler.wrapped", severity="error", raised_by="deepspeed.initialize", evidence=_ENGINE)
def wrapped(config: Config) -> Iterator[Hit]:
    """A schedule of torch's over an optimizer that DeepSpeed wraps."""
    name = schedule(config)
    if name in TORCH and config.has("scheduler.params") and (config.sharded or config.precision != "fp32"):
        reason = f"ZeRO stage {config.stage}" if config.sharded else config.precision
        message = (
            f"torch's {name} under {reason}: it gets DeepSpeed's wrapper, which is no torch "
            "Optimizer (TypeError)."
        )
        yield config.hit(
            "scheduler.type", message, "Use a schedule of DeepSpeed's, or pass a callable in the script."
        )


@config_rule("scheduler.warmup-shape", severity="info", evidence=_SCHEDULES)
def shape(config: Config) -> Iterator[Hit]:
    """A warm-up that is logarithmic where linear may be meant."""
    if not schedule(config).startswith("Warmup") or not isinstance(config.get("scheduler.params"), dict):
        return
    key = "scheduler.params.warmup_type"
    value, fix = config.get(key), 'Write "warmup_type": "linear" (or "log").'
    if not config.has(key):
        message = "warmup_type isn't given, and DeepSpeed warms up logarithmically, not linearly."
        yield config.hit("scheduler.params", message, fix)
    elif value not in ("log", "linear", "auto"):
        message = f"warmup_type {value!r} is neither log nor linear; DeepSpeed warns and takes log."
        yield config.hit(key, message, fix, severity="wrong")


@config_rule("scheduler.peak", severity="wrong", evidence=_SCHEDULES)
def peak(config: Config) -> Iterator[Hit]:
    """A schedule whose peak isn't the optimizer's learning rate."""
    rate, name = config.number("optimizer.params.lr"), schedule(config)
    top = config.number("scheduler.params.warmup_max_lr")
    if rate is None or name not in ("WarmupLR", "WarmupDecayLR"):
        return
    if top is not None and top != rate:
        message = f"warmup_max_lr {top:g} wins over the optimizer's lr {rate:g}, which is never used."
        yield config.hit("scheduler.params.warmup_max_lr", message, "Write the same number in both places.")
    elif name == "WarmupDecayLR" and not config.has("scheduler.params.warmup_max_lr") and rate != _DECAY_PEAK:
        message = (
            f"WarmupDecayLR without warmup_max_lr peaks at {_DECAY_PEAK}, not at the optimizer's lr {rate:g}."
        )
        yield config.hit("scheduler.params", message, f'Write "warmup_max_lr": {rate:g}.')


_DECAY_PEAK = 0.001


@config_rule("scheduler.length", severity="wrong", evidence=_SCHEDULES)
def length(config: Config) -> Iterator[Hit]:
    """A schedule that ends before the run does."""
    steps, total = (
        config.plan.training.steps if config.plan else None,
        config.number("scheduler.params.total_num_steps"),
    )
    if steps and total is not None and 0 < total < steps:
        message = (
            f"total_num_steps {total:g}, but the run has {steps} optimizer steps: the rest "
            "has no learning rate."
        )
        yield config.hit("scheduler.params.total_num_steps", message, f"Write {steps}.")
