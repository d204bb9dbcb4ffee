"""What DeepSpeed's learning-rate schedules take, and which rate wins."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import listed, nearest
from dslaunch.rules.config import Config, config_rule
from dslaunch.rules.registry import Hit
from dslaunch.rules.values import is_text, shown

_ENGINE = "deepspeed/runtime/engine.py _scheduler_from_config 0.19.8, run"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py 0.19.8, run"
_WARMUP = {"warmup_num_steps", "warmup_type", "last_batch_iteration"}
_KEYWORDS = {
    "WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
    "OneCycle": {
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
        "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    },
}  # fmt: skip
"""Keyword arguments of each; a test compares them with the classes."""
TORCH = frozenset({
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LambdaLR",
    "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
    "SequentialLR", "StepLR",
})  # fmt: skip
"""torch.optim.lr_scheduler's (2.13)."""
_REQUIRED = {
    "CosineAnnealingLR": ("T_max",), "CosineAnnealingWarmRestarts": ("T_0",), "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",), "LambdaLR": ("lr_lambda",), "MultiStepLR": ("milestones",),
    "MultiplicativeLR": ("lr_lambda",), "OneCycleLR": ("max_lr",), "SequentialLR": ("schedulers", "milestones"),
    "StepLR": ("step_size",),
}  # fmt: skip
"""Arguments of torch's without a default (2.13)."""


def schedule(config: Config) -> str:
    """The schedule's name; empty where none is named."""
    name = config.get("scheduler.type")
    return name if isinstance(name, str) else ""


@config_rule("scheduler.type", severity="error", raised_by="deepspeed.initialize", evidence=_ENGINE)
def unknown_type(config: Config) -> Iterator[Hit]:
    """A schedule that neither DeepSpeed nor torch has under this name."""
    name = schedule(config)
    if name and name not in _KEYWORDS and name not in TORCH:
        message = f"no schedule is called {name!r}; DeepSpeed asserts at start-up.{nearest(name, _KEYWORDS)}"
        yield config.hit("scheduler.type", message, f"Use {listed(_KEYWORDS)}; capitals count.")


@config_rule(
    "scheduler.params",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence=f"{_ENGINE}; {_SCHEDULES}",
)
def bad_params(config: Config) -> Iterator[Hit]:
    """Parameters that are missing, or that the schedule doesn't take."""
    name, params = schedule(config), config.get("scheduler.params")
    if name and not config.has("scheduler.params"):
        message = f"{name} without params: DeepSpeed raises TypeError, even where every one has a default."
        yield config.hit("scheduler", message, 'Write "params": {} and what the schedule needs.')
    if not isinstance(params, dict):
        return
    for key in _REQUIRED.get(name, ()):
        if key not in params:
            message = f"torch's {name} needs {key}: TypeError when the scheduler is built."
            yield config.hit("scheduler.params", message, f"Give {key}.")
    if name not in _KEYWORDS:
        return
    for key in params:
        if key not in _KEYWORDS[name]:
            message = (
                f"{name} takes no '{key}': TypeError when the scheduler is "
                f"built.{nearest(key, _KEYWORDS[name])}"
            )
            fix = _COSINE if name == "WarmupCosineLR" else f"Use {listed(sorted(_KEYWORDS[name]))}."
            yield config.hit(f"scheduler.params.{key}", message, fix)
        elif key in _NUMBERS and is_text(params[key]):
            message = f"'{key}' is {shown(params[key])}, a text: TypeError when the scheduler is built."
            yield config.hit(f"scheduler.params.{key}", message, "Write the number without quotes.")
    yield from _demands(config, name, params)


_NUMBERS = frozenset({
    "total_num_steps", "warmup_max_lr", "warmup_min_lr", "warmup_min_ratio", "cycle_min_lr", "cycle_max_lr",
    "lr_range_test_min_lr", "lr_range_test_step_rate",
})  # fmt: skip
"""Parameters that a schedule computes with when it is built."""
_COSINE = "Give warmup_min_ratio and cos_min_ratio; the peak is the optimizer's lr."


def _demands(config: Config, name: str, params: dict[str, object]) -> Iterator[Hit]:
    """What OneCycle and LRRangeTest need."""
    needed = ("cycle_min_lr", "cycle_max_lr") if name == "OneCycle" else ()
    for key in (key for key in needed if key not in params):
        yield config.hit(
            "scheduler.params", f"OneCycle needs {key}: DeepSpeed raises TypeError.", f"Give {key}."
        )
    positive = {"OneCycle": "cycle_first_step_size", "LRRangeTest": "lr_range_test_step_size"}.get(name, "")
    size = config.number(f"scheduler.params.{positive}")
    if positive and size is not None and size <= 0 and config.at_least("0.19.4"):
        message = f"{positive} is {size:g}; DeepSpeed raises ValueError for what isn't above 0."
        yield config.hit(f"scheduler.params.{positive}", message, "Write a number of steps.")
    second = config.number("scheduler.params.cycle_second_step_size") if name == "OneCycle" else None
    if second is not None and second < 0 and config.at_least("0.19.4"):
        message = f"cycle_second_step_size is {second:g}; DeepSpeed raises ValueError below 0."
        yield config.hit("scheduler.params.cycle_second_step_size", message, "Write a number of steps.")


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
