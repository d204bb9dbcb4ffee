"""What measures, logs and saves: profilers, monitors, checkpoints, the autotuner."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config, config_rule, configs
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_CONFIG = "deepspeed/runtime/config.py 0.19.8, run"
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_METERS = ("wall_clock_breakdown", "flops_profiler.enabled", "comms_logger.enabled", "memory_breakdown")


@config_rule(
    "monitor.overhead", severity="slow", evidence="deepspeed/runtime/engine.py, comm/config.py 0.19.8"
)
def overhead(config: Config) -> Iterator[Hit]:
    """Measurements that wait for the GPU in each step."""
    for key in (key for key in _METERS if config.get(key) is True):
        yield config.hit(
            key, f"{key} waits for the GPU in each step.", "Switch it off once the measurement is done."
        )


    if config.get("timers.throughput.enabled") is True and config.get("timers.throughput.synchronized") is True:
        message = "timers.throughput.synchronized waits for the GPU in each step."
        yield config.hit("timers.throughput.synchronized", message, "Write false; the figures are close enough.")


@config_rule("monitor.package", severity="info", evidence="deepspeed/monitor/monitor.py MonitorMaster 0.19.8")
def package(config: Config) -> Iterator[Hit]:
    """A monitor whose package rank 0 needs: where it is missing there, the other ranks wait."""
    for section, name in _PACKAGES.items():
        if config.get(f"{section}.enabled") is True:
            message = f"rank 0 needs the package {name}: without it ModuleNotFoundError there, and the rest wait."
            yield config.hit(f"{section}.enabled", message, f"Install {name} in the training environment.")


@config_rule(
    "monitor.folder", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/monitor/csv_monitor.py setup_log_dir 0.19.8, run",
)  # fmt: skip
def folder(config: Config) -> Iterator[Hit]:
    """A CSV monitor whose folder has no name: neither output_path nor job_name."""
    unnamed = config.get("csv_monitor.job_name") == "" and not config.get("csv_monitor.output_path")
    if config.on("csv_monitor.enabled") and unnamed:
        message = "neither job_name nor output_path names a folder: FileNotFoundError on rank 0, the rest wait."
        yield config.hit("csv_monitor.job_name", message, "Give output_path, or delete job_name.")


@config_rule(
    "autotuning.paths", severity="error", raised_by="DeepSpeedConfig",
    evidence="deepspeed/autotuning/config.py DeepSpeedAutotuningConfig 0.19.8, run",
)  # fmt: skip
def autotuning_paths(config: Config) -> Iterator[Hit]:
    """A folder of the autotuner's that is written as nothing."""
    for name in ("results_dir", "exps_dir"):
        key = f"autotuning.{name}"
        if isinstance(config.get("autotuning"), dict) and config.has(key) and not config.get(key):
            yield config.hit(key, f"{name} is empty: AssertionError at start-up.", "Name a folder, or delete it.")


@config_rule("monitor.profile-step", severity="wrong", evidence="deepspeed/profiling/config.py 0.19.8")
def profile_step(config: Config) -> Iterator[Hit]:
    """A profile of a step that the run doesn't reach."""
    step, steps = (
        config.number("flops_profiler.profile_step"),
        config.plan.training.steps if config.plan else None,
    )
    if config.get("flops_profiler.enabled") is True and step is not None and steps and step > steps:
        message = f"profile_step {step:g} of {steps} steps: nothing is printed."
        yield config.hit("flops_profiler.profile_step", message, "Name an earlier step.")


@config_rule("monitor.vocabulary", severity="slow", evidence=_CONFIG)
def vocabulary(config: Config) -> Iterator[Hit]:
    """A vocabulary that tensor cores can't cut evenly."""
    size = config.number("vocabulary_size")
    if size and size % 8:
        message = f"vocabulary_size {size:g} is no multiple of 8, which tensor cores want; DeepSpeed warns."
        yield config.hit("vocabulary_size", message, f"Pad it to {-(-int(size) // 8) * 8}.")


@config_rule(
    "checkpoint.universal", severity="info", evidence="deepspeed/runtime/engine.py _load_checkpoint 0.19.8"
)
def universal(config: Config) -> Iterator[Hit]:
    """load_universal, which needs a converted checkpoint."""
    if config.get("checkpoint.load_universal") is True:
        message = "load_universal: loading raises ValueError where the folder has no latest_universal."
        yield config.hit(
            "checkpoint.load_universal", message, "Convert it first with deepspeed's ds_to_universal.py."
        )


@config_rule(
    "checkpoint.storage",
    severity="info",
    evidence="deepspeed/runtime/engine.py _configure_checkpointing 0.19.8",
)
def storage(config: Config) -> Iterator[Hit]:
    """Checkpoints for node-local disks, or through a package that may be missing."""
    if config.get("checkpoint.use_node_local_storage") is True:
        message = "use_node_local_storage: each node writes its own files, twice the same on a shared disk."
        yield config.hit(
            "checkpoint.use_node_local_storage", message, "Use it only where the path is local to a node."
        )
    if config.get("datastates_ckpt") not in (None, False):
        message = "datastates_ckpt: RuntimeError at start-up where the package DataStates isn't installed."
        yield config.hit("datastates_ckpt", message, "Install it on every node, or delete the key.")


@rule(
    "checkpoint.writer", severity="error", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/model_checkpointing/utils.py 0.19.8, run",
)  # fmt: skip
def writer(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A checkpoint writer in a job that DeepSpeed's launcher doesn't start."""
    others = [
        command.launchers[-1].program for _, command in files.launches()
        if command.launchers and command.launcher("deepspeed") is None and not _exports(command.environment)
    ]  # fmt: skip
    for config in configs(plan, files, settings):
        if others and isinstance(config.get("checkpoint.writer"), dict):
            message = (
                f"checkpoint.writer under {others[0]}: KeyError, CROSS_SIZE is set by DeepSpeed's "
                "launcher alone."
            )
            fix = "Export CROSS_RANK (node), CROSS_SIZE (nodes) and LOCAL_SIZE, or start with deepspeed."
            yield config.hit("checkpoint.writer", message, fix)


@config_rule(
    "checkpoint.writer-unit", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/model_checkpointing/data_parallel_writer_factory.py 0.19.8, run",
)  # fmt: skip
def writer_unit(config: Config) -> Iterator[Hit]:
    """A checkpoint writer without data_parallel at ZeRO stage 0, 1 or 2."""
    section = config.get("checkpoint.writer")
    alone = config.stages == 1 and config.plan is None and config.get("expert_parallel.enabled") is not True
    if isinstance(section, dict) and section.get("data_parallel") is None and config.stage in (0, 1, 2) and alone:
        message = "checkpoint.writer without data_parallel: AttributeError, DeepSpeed has no such rank."
        yield config.hit("checkpoint.writer", message, 'Write "data_parallel": "replica", or delete the writer.')


def _exports(environment: tuple[object, ...]) -> bool:
    return any(getattr(assignment, "name", "") == "CROSS_SIZE" for assignment in environment)


@rule(
    "autotuning.arguments", severity="error", raised_by="nobody",
    evidence="huggingface/transformers#27830; deepspeedai/DeepSpeed:deepspeed/autotuning/autotuner.py 0.19.8",
)  # fmt: skip
def autotuning(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """The autotuner over a Hugging Face script, whose own arguments then contradict the file."""
    trainer = bool(settings.huggingface) or bool(files.of("hf_arguments")) or any(
        command.arguments.has("--per_device_train_batch_size") for _, command in files.launches()
    )  # fmt: skip
    for config in configs(plan, files, settings):
        if trainer and config.get("autotuning.enabled") is True and not config.get("autotuning.arg_mappings"):
            message = (
                "autotuning without arg_mappings: each trial changes the file alone, and the "
                "Trainer refuses it."
            )
            fix = 'Map "train_micro_batch_size_per_gpu" to "--per_device_train_batch_size", and the others alike.'
            yield config.hit("autotuning.enabled", message, fix)
