"""Learning-rate schedules of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.engines.deepspeed_keys import release
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_WITH_TOTAL = ("WarmupDecayLR", "WarmupCosineLR")


@rule(
    "scheduler.warmup",
    severity="error",
    raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/lr_schedules.py 0.19.8; DeepSpeed#8126 (0.19.3)",
)
def warmup(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Warm-up steps that are no positive whole number, or no total to decay over."""
    for file in files.of("deepspeed_json"):
        name, params = file.get("scheduler", "type"), file.get("scheduler", "params")
        if name not in _WARMUP or not isinstance(params, dict):
            continue
        steps, total = params.get("warmup_num_steps", 1000), params.get("total_num_steps")
        if not _positive(steps) and steps != "auto":
            yield _bad_steps(file, steps, settings)
        if name in _WITH_TOTAL and "total_num_steps" not in params:
            message = f"{name} needs total_num_steps: DeepSpeed raises TypeError when it builds the scheduler."
            yield hit(file, ("scheduler", "params"), message, "Give the number of optimizer steps of the run.")
        elif name in _WITH_TOTAL and _positive(steps) and _positive(total) and total < steps:
            path, fix = ("scheduler", "params", "total_num_steps"), "Give the optimizer steps of the whole run."
            message = f"total_num_steps {total} < warmup_num_steps {steps}: the rate falls to its floor at once."
            yield hit(file, path, message, fix, severity="wrong", raised_by="nobody")


def _bad_steps(file: File, steps: object, settings: Settings) -> Hit:
    path, fix = ("scheduler", "params", "warmup_num_steps"), "Write a whole number above 0."
    message = f"warmup_num_steps is {steps!r}, which is no whole number above 0; DeepSpeed"
    if release(settings.deepspeed_version) >= (0, 19, 3):
        return hit(file, path, f"{message} raises ValueError.", fix)
    message = f"{message} {settings.deepspeed_version} goes on with another warm-up."
    return hit(file, path, message, fix, severity="wrong", raised_by="nobody")


def _positive(value: object) -> bool:
    return isinstance(value, int) and value > 0
