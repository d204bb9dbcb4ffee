"""fp16 and bf16."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.coercion import number
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.deepspeed.zero import on, stage
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_EVIDENCE = "deepspeedai/DeepSpeed:deepspeed/runtime/config.py, runtime/precision_config.py 0.19.8, run"


@rule("precision.both", severity="error", raised_by="DeepSpeedConfig", evidence=_EVIDENCE)
def both(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """fp16 and bf16 are both enabled."""
    for file in files.of("deepspeed_json"):
        bf16 = _bf16(file)
        if on(file.get("fp16", "enabled")) and on(file.get(bf16, "enabled")):
            message = f"fp16 and {bf16} are both enabled; DeepSpeed asserts that one of them is off."
            yield hit(file, ("fp16", "enabled"), message, "Keep bf16 on Ampere and newer GPUs, fp16 on V100.")


@rule(
    "precision.master-weights",
    severity="error",
    raised_by="DeepSpeedConfig",
    since="0.18.9",
    evidence=_EVIDENCE,
)
def master_weights(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """16-bit master weights or optimizer states without what they need."""
    for file in files.of("deepspeed_json"):
        bf16 = _bf16(file)
        names = [("fp16", "fp16_master_weights_and_grads"), (bf16, "bf16_master_weights_and_grads"),
                 (bf16, "bf16_optimizer_states")]  # fmt: skip
        for path in names:
            if on(file.get(*path)) and stage(file) == 0:
                message = f"{path[1]} at ZeRO stage 0: DeepSpeed asserts stage 1, 2 or 3."
                yield hit(file, path, message, "Use a ZeRO stage, or switch it off.")
        if on(file.get(bf16, "bf16_optimizer_states")) and not on(file.get(bf16, "bf16_master_weights_and_grads")):
            message = "bf16_optimizer_states without bf16_master_weights_and_grads: DeepSpeed asserts the latter."
            yield hit(file, (bf16, "bf16_optimizer_states"), message, "Switch both on, or both off.")


@rule("precision.loss-scale", severity="error", raised_by="DeepSpeedConfig", evidence=_EVIDENCE)
def loss_scale(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A loss scale that fp16 can't work with."""
    for file in files.of("deepspeed_json"):
        for name in ("loss_scale", "loss_scale_window", "min_loss_scale"):
            value = file.get("fp16", name)
            if isinstance(value, bool) or (name != "loss_scale" and _is_fraction_text(value)):
                message = f"fp16.{name} is {shown(value)}; DeepSpeed refuses that here."
                yield hit(file, ("fp16", name), message, "Write a number.")
        if on(file.get("fp16", "enabled")) and not number(file.get("fp16", "loss_scale") or 0):
            for name in ("loss_scale_window", "min_loss_scale"):
                value = number(file.get("fp16", name))
                if value is not None and value <= 0 and not isinstance(file.get("fp16", name), bool):
                    message = f"fp16.{name} is {value:g}; dynamic loss scaling (loss_scale 0) needs more than 0."
                    yield hit(file, ("fp16", name), message, "Delete it: the default works.")


@rule(
    "precision.scale-power", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/fp16/loss_scaler.py, precision_config.py 0.19.8, run",
)  # fmt: skip
def scale_power(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """fp16.initial_scale_power, the exponent of the first loss scale, beyond what a number holds."""
    for file in files.of("deepspeed_json"):
        power = number(file.get("fp16", "initial_scale_power"))
        dynamic = on(file.get("fp16", "enabled")) and not number(file.get("fp16", "loss_scale") or 0)
        least, most = (-1074, 1023) if stage(file) == 0 else (None, 63)
        if power is None or not dynamic or stage(file) is None:
            continue
        message = f"fp16.initial_scale_power is {power:g}: a loss scale of 2**{power:g}"
        if power > most:
            message += f" is more than a loss can be multiplied by at ZeRO stage {stage(file)}, OverflowError."
            yield hit(file, ("fp16", "initial_scale_power"), message, "Write 16, with which DeepSpeed starts.")
        elif least is not None and power < least:
            message += " is 0, and DeepSpeed divides by it: ZeroDivisionError."
            yield hit(file, ("fp16", "initial_scale_power"), message, "Write 16, with which DeepSpeed starts.")


def _is_fraction_text(value: object) -> bool:
    """Text such as `2.0`: pydantic would take it for an int, DeepSpeed's own validator doesn't."""
    return isinstance(value, str) and "." in value and number(value) is not None


def _bf16(file: File) -> str:
    """The section that counts: bfloat16 is read only where bf16 is missing or null."""
    return "bfloat16" if file.get("bf16") is None and file.get("bfloat16") is not None else "bf16"
