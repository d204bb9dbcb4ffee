"""What the runtime executes, and the refusal of every other plan."""

from __future__ import annotations

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.runtime.supported import check_model

_EXECUTES = (
    "dslaunch.runtime executes one layout for the whole model, with tp = pp = cp = ep = 1: "
    "strategy=ddp, fsdp2, zero1, zero2, zero3 or zero3_cpu_offload"
)


def check_executable(plan: Plan) -> None:
    """Refuse a plan that the runtime does not execute.

    Raises:
        ConfigError: a layout per component, model parallelism, a setting that the sharding lacks, or a model
            whose modules the runtime lacks.
    """
    _check_layouts(plan)
    _check_sharding(plan)
    if plan.training.optimizer != "adamw":
        raise ConfigError(f"training.optimizer: found '{plan.training.optimizer}'; the runtime has adamw.")
    if plan.files.weights:
        raise ConfigError(
            f"model.weights: found '{plan.files.weights}'; dslaunch.runtime starts from random weights or "
            "from a checkpoint of its own (checkpoint.load=DIR). Leave it empty, or give script=PATH."
        )
    check_model(plan.model["components"], plan.model["edges"])


def _check_layouts(plan: Plan) -> None:
    for name, layout in plan.components.items():
        if max(layout.tp, layout.pp, layout.cp, layout.ep) > 1 or layout.dp != plan.world_size:
            raise ConfigError(
                f"components.{name}: its layout is {in_words(layout)} on {plan.world_size} ranks. "
                f"{_EXECUTES}."
            )
    (first, base), *others = plan.components.items()
    for name, layout in others:
        if _comparable(layout) != _comparable(base):
            raise ConfigError(
                f"components.{name}: its layout is {in_words(layout)}, that of {first} is {in_words(base)}. "
                f"{_EXECUTES}."
            )
    if plan.engine.name == "native":
        raise ConfigError(
            "engine.name: found native, which gives each component an engine of its own; "
            f"{_EXECUTES}. engine=deepspeed executes this plan."
        )


def _comparable(layout: ComponentPlan) -> tuple[object, ...]:
    return (layout.zero, layout.offload, layout.micro_batch, layout.num_microbatches, layout.rank_offset)


def in_words(layout: ComponentPlan) -> str:
    """Such as `TP8 PP4 DP2 ZeRO-1, micro-batch 1 x 256`."""
    extra = "".join(f" {key.upper()}{n}" for key, n in (("cp", layout.cp), ("ep", layout.ep)) if n > 1)
    offload = f", offload {layout.offload}" if layout.offload != "none" else ""
    return (
        f"TP{layout.tp} PP{layout.pp}{extra} DP{layout.dp} ZeRO-{layout.zero}{offload}, "
        f"micro-batch {layout.micro_batch} x {layout.num_microbatches}"
    )


def _check_sharding(plan: Plan) -> None:
    """DDP, FSDP2 and ZeRO-0: no fp16, states on the device.

    Under ZeRO-0 DeepSpeed 0.19.8 makes its Adam states for half precision by a step with zero gradients
    (runtime/fp16/unfused_optimizer.py), which leaves the bias correction one step ahead.
    """
    sharding = plan.engine.sharding
    layout = next(iter(plan.components.values()))
    if sharding == "zero" and layout.zero > 0:
        return
    if sharding == "zero" and plan.training.precision != "fp32":
        raise ConfigError(
            f"training.precision: found {plan.training.precision} with ZeRO-0, which dslaunch.runtime runs "
            "in fp32 only. strategy=ddp is the same layout."
        )
    if layout.offload != "none":
        raise ConfigError(
            f"strategy.every.offload: found '{layout.offload}' with {sharding}; dslaunch.runtime offloads "
            "under ZeRO 1-3 only, such as strategy=zero3_cpu_offload."
        )
    if plan.training.precision == "fp16":
        raise ConfigError(
            f"training.precision: found fp16 with {sharding}; dslaunch.runtime scales the loss "
            "under ZeRO 1-3 only. Use bf16 or fp32."
        )
