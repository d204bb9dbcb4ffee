"""Offload to host memory and NVMe, and ZenFlow, which builds on it."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule, configs
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_SWAP = "deepspeed/runtime/zero/stage3.py, runtime/zero/partition_parameters.py 0.19.8, run"
_FLOW = "deepspeed/runtime/zenflow/engine.py, zenflow_stage_1_and_2.py 0.19.8, run"


@config_rule("offload.nvme-path", severity="error", raised_by="deepspeed.initialize", evidence=_SWAP)
def nvme_path(config: Config) -> Iterator[Hit]:
    """NVMe without a path."""
    for name in ("optimizer", "param"):
        key = f"{ZERO}.offload_{name}"
        if config.stage == 3 and config.offload(name) == "nvme" and not config.get(f"{key}.nvme_path"):
            error = "TypeError" if name == "optimizer" else "AssertionError"
            message = f"offload_{name}.device nvme without nvme_path: {error} when the engine is built."
            yield config.hit(
                f"{key}.device", message, 'Write "nvme_path": a folder of this job on local NVMe.'
            )


@rule(
    "offload.nvme-shared", severity="info", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/swap_tensor/partitioned_param_swapper.py 0.19.8",
)  # fmt: skip
def nvme_shared(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Two configurations that swap parameters in one folder, where each rank begins by emptying its own."""
    seen: dict[object, str] = {}
    for config in configs(plan, files, settings):
        key = f"{ZERO}.offload_param.nvme_path"
        path = config.get(key)
        if config.stage != 3 or config.offload("param") != "nvme" or not isinstance(path, str):
            continue
        first = seen.setdefault(path, config.file.name)
        if first != config.file.name:
            message = f"{first} names {path} too: of two jobs on a node the later deletes what the other swapped."
            yield config.hit(key, message, "Give each job a folder of its own, if both may run at a time.")


@config_rule(
    "offload.nvme-stage", severity="wrong",
    evidence="deepspeed/runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__ 0.19.8",
)  # fmt: skip
def nvme_stage(config: Config) -> Iterator[Hit]:
    """Optimizer states for NVMe at stage 1 or 2, where they go to host memory."""
    if config.stage in (1, 2) and config.offload("optimizer") == "nvme":
        message = (
            f"offload_optimizer.device nvme at ZeRO stage {config.stage}: the states stay in host memory."
        )
        yield config.hit(f"{ZERO}.offload_optimizer.device", message, "Use stage 3, or write cpu.")


@config_rule("offload.ratio", severity="error", raised_by="deepspeed.initialize", evidence=_SWAP)
def ratio(config: Config) -> Iterator[Hit]:
    """A part of the optimizer states on the GPU, with another optimizer than DeepSpeed's Adam."""
    key = f"{ZERO}.offload_optimizer.ratio"
    part = config.number(key)
    if config.stage != 3 or config.offload("optimizer") == "none" or part is None or not 0 <= part < 1:
        return
    plain = config.optimizer in ("adam", "adamw") and not config.get("optimizer.params.torch_adam")
    if config.optimizer and not plain:
        message = f"ratio {part:g} with {config.get('optimizer.type')}: DeepSpeed asserts DeepSpeedCPUAdam."
        yield config.hit(key, message, "Use Adam or AdamW without torch_adam, or delete the ratio.")


@config_rule(
    "offload.super", severity="wrong", since="0.18.0",
    evidence="deepspeed/runtime/engine.py, runtime/superoffload/superoffload_stage3.py 0.19.8, run",
)  # fmt: skip
def super_offload(config: Config) -> Iterator[Hit]:
    """super_offload where it isn't used."""
    key = f"{ZERO}.offload_optimizer.super_offload"
    if config.on(key) and not (config.stage == 3 and config.offload("optimizer") == "cpu"):
        message = (
            f"super_offload at ZeRO stage {config.stage} with device "
            f"{config.offload('optimizer')} is ignored."
        )
        yield config.hit(key, message, "Use stage 3 and device cpu, on NVIDIA GPUs.")


@config_rule(
    "zenflow.offload", severity="error", raised_by="deepspeed.initialize", since="0.17.5", evidence=_FLOW
)
def zenflow_offload(config: Config) -> Iterator[Hit]:
    """ZenFlow without ZeRO, or without optimizer states on the CPU."""
    if config.stage in (1, 2) and _zenflow(config) and config.offload("optimizer") == "none":
        message = "zenflow without offload_optimizer to the CPU: DeepSpeed raises ValueError."
        yield config.hit(f"{ZERO}.zenflow", message, 'Write "offload_optimizer": {"device": "cpu"}.')
    elif _steps_alone(config):
        message = "zenflow at ZeRO stage 0: a step raises AttributeError, as the optimizer isn't ZeRO's."
        yield config.hit(f"{ZERO}.zenflow", message, "Write stage 1, 2 or 3, with optimizer states on the CPU.")


def _steps_alone(config: Config) -> bool:
    """Whether ZenFlow's own step meets an optimizer that isn't ZeRO's: a pipeline steps by itself."""
    return config.stage == 0 and config.stages == 1 and _zenflow(config)


@config_rule(
    "zenflow.interval", severity="error", raised_by="deepspeed.initialize", since="0.17.5", evidence=_FLOW
)
def zenflow_interval(config: Config) -> Iterator[Hit]:
    """Intervals of ZenFlow that contradict its strategy or each other."""
    if not _zenflow(config):
        return
    key = f"{ZERO}.zenflow.select_interval"
    strategy = config.get(f"{ZERO}.zenflow.select_strategy") or "auto"
    select, update = config.get(key), config.number(f"{ZERO}.zenflow.update_interval")
    if strategy == "auto" and isinstance(select, int):
        yield config.hit(
            key, "select_interval with strategy auto, which sets it: DeepSpeed raises.", "Delete it."
        )
    elif strategy in ("step", "epoch") and (select is None or select == "auto"):
        message = f"select_strategy {strategy} without select_interval: DeepSpeed raises ValueError."
        yield config.hit(key, message, "Write a whole number.")
    elif strategy == "step" and isinstance(select, int) and update is not None and select < update:
        message = (
            f"select_interval {select} is below update_interval {update:g}: DeepSpeed raises ValueError."
        )
        yield config.hit(key, message, f"Write {update:g} or more.")


@config_rule(
    "zenflow.overlap", severity="error", raised_by="deepspeed.initialize", since="0.17.5", evidence=_FLOW
)
def zenflow_overlap(config: Config) -> Iterator[Hit]:
    """zenflow.offload without overlap_comm, which is off unless given at stage 1 and 2."""
    given = config.on(f"{ZERO}.overlap_comm") or (
        config.stage == 3 and not config.off(f"{ZERO}.overlap_comm")
    )
    if config.sharded and config.on(f"{ZERO}.zenflow.offload") and not given:
        message = "zenflow.offload without overlap_comm: DeepSpeed asserts that it is on."
        yield config.hit(f"{ZERO}.zenflow.offload", message, 'Write "overlap_comm": true.')


@config_rule("zenflow.steps", severity="wrong", since="0.17.5", evidence=f"{_FLOW}; runtime/pipe/engine.py")
def zenflow_steps(config: Config) -> Iterator[Hit]:
    """gradient_accumulation_steps beside ZenFlow, which overwrites it; a pipeline asserts that it stays."""
    if not _zenflow(config):
        return
    steps = config.number("gradient_accumulation_steps")
    update = config.number(f"{ZERO}.zenflow.update_interval") or 0
    in_pipeline = config.stages > 1 and config.stage in (0, 1)
    if in_pipeline and steps is None and not config.has("train_batch_size"):
        steps = 1
    if steps is None or steps == update:
        return
    if in_pipeline:
        message = (
            f"zenflow overwrites gradient_accumulation_steps {steps:g} with {update:g}, its update_interval "
            "(0 for auto), and the pipeline asserts that the batch is still the product."
        )
        yield config.hit(
            f"{ZERO}.zenflow", message, f'Write "update_interval": {steps:g}, or go without zenflow.',
            severity="error", raised_by="deepspeed.initialize",
        )  # fmt: skip
    elif steps != 1:
        message = f"zenflow overwrites gradient_accumulation_steps {steps:g} with its update_interval."
        yield config.hit("gradient_accumulation_steps", message, "Write 1, and set update_interval.")


def _zenflow(config: Config) -> bool:
    return isinstance(config.get(f"{ZERO}.zenflow"), dict)
