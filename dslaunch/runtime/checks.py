"""What the runtime executes, and the refusal of every other plan."""

from __future__ import annotations

from pathlib import Path

from dslaunch.errors import ConfigError, listed
from dslaunch.planfile import ComponentPlan, Plan, plan_from_json
from dslaunch.runtime.supported import check_model, check_weights, cut_faults, macro_faults, trunk_of

_EXECUTES = (
    "with this engine dslaunch.runtime executes one layout for the whole model, with tp = pp = cp = ep = 1: "
    "strategy=ddp, fsdp2, zero1, zero2, zero3 or zero3_cpu_offload; engine=native executes one for each component"
)

_SCHEDULES = ("1f1b", "gpipe", "interleaved")
_NATIVE: dict[str, tuple[object, ...]] = {"cp": (1,), "ep": (1,), "offload": ("cpu", "none")}
"""By field of a layout: the values that are executed."""


def read_plan(path: Path) -> Plan:
    """The plan in `path`; raises ConfigError where it is missing or not a plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Give the plan.json that `dslaunch render` wrote."
        ) from error
    return plan_from_json(text, str(path))


def check_executable(plan: Plan) -> None:
    """Refuse a plan that the runtime does not execute.

    Raises:
        ConfigError: a layout that the plan's engine does not execute here, a setting that the sharding lacks,
            or a model whose modules the runtime lacks.
    """
    if plan.engine.name != "native":
        _check_layouts(plan)
        _check_sharding(plan)
    if plan.training.optimizer != "adamw":
        raise ConfigError(f"training.optimizer: found '{plan.training.optimizer}'; the runtime has adamw.")
    check_weights(plan.model["components"], plan.files.weights, plan.model["edges"])
    check_model(plan.model["components"], plan.model["edges"])
    if plan.engine.name == "native":
        _check_native(plan)


def _check_native(plan: Plan) -> None:
    """What an edited plan may hold, and the planner would have refused for the engine native."""
    if plan.training.schedule not in _SCHEDULES:
        raise ConfigError(
            f"training.schedule: found {plan.training.schedule}; with engine native dslaunch.runtime takes "
            f"{listed(_SCHEDULES)}. Plan again with one of them."
        )
    _check_interleaved(plan)
    for name, layout in plan.components.items():
        allowed = {**_NATIVE, "zero": (0, 1) if layout.pp > 1 else (0, 1, 2, 3)}
        for key, values in allowed.items():
            if getattr(layout, key) not in values:
                beside = f" where pp is {layout.pp}" if key == "zero" else ""
                raise ConfigError(
                    f"components.{name}.{key}: found {getattr(layout, key)}; with engine native dslaunch.runtime "
                    f"takes {listed(values)}{beside}. Plan again with strategy.{name}.{key}={values[-1]}."
                )
        batch = layout.micro_batch * layout.num_microbatches * layout.dp
        if batch != plan.global_batch:
            raise ConfigError(
                f"components.{name}: micro_batch x num_microbatches x dp is {batch}; global_batch is "
                f"{plan.global_batch}. Plan again."
            )
    specs, edges, training = plan.model["components"], list(plan.model["edges"]), plan.training
    faults = cut_faults(specs, edges, plan.components, training.precision, training.seq_len)
    faults += macro_faults(specs, edges, plan.components, training.macro_batches)
    if faults:
        raise ConfigError("\n".join(faults))


def _check_interleaved(plan: Plan) -> None:
    name = trunk_of(plan.model["components"])
    layout, schedule = plan.components[name], plan.training.schedule
    wanted = schedule == "interleaved"
    if wanted != (layout.vpp > 1) or (wanted and layout.num_microbatches % layout.pp):
        raise ConfigError(
            f"training.schedule: found {schedule}, where components.{name} has vpp {layout.vpp}, pp {layout.pp} "
            f"and num_microbatches {layout.num_microbatches}. interleaved goes with a vpp of 2 or more and a "
            "multiple of pp micro-batches; the others with vpp 1. Plan again."
        )


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
