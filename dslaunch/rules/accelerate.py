"""accelerate's configuration, where it starts DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.config import ZERO, Config, configs
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_PLUGIN = "huggingface/accelerate:src/accelerate/utils/dataclasses.py DeepSpeedPlugin 1.15.0, run"
_LAUNCH = "huggingface/accelerate:src/accelerate/utils/launch.py 1.15.0"
_IN_JSON = frozenset({
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path",
    "offload_optimizer_nvme_path", "zero3_save_16bit_model",
})  # fmt: skip
"""Fields that must not stand beside deepspeed_config_file."""
_FIELDS = _IN_JSON | {
    "deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names",
}  # fmt: skip


def _deepspeed(files: FileSet) -> Iterator[File]:
    for file in files.of("accelerate"):
        if (
            isinstance(file.get("deepspeed_config"), dict)
            and str(file.get("distributed_type")).upper() == "DEEPSPEED"
        ):
            yield file


@rule("accelerate.fields", severity="error", raised_by="accelerate", evidence=_PLUGIN)
def fields(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Fields beside deepspeed_config_file that only the DeepSpeed JSON may hold."""
    fix = "Keep it in the DeepSpeed JSON alone."
    for file in _deepspeed(files):
        section = file.get("deepspeed_config")
        if "deepspeed_config_file" not in section:
            continue
        for name in (name for name in section if name in _IN_JSON):
            message = f"{name} beside deepspeed_config_file: accelerate raises ValueError."
            yield hit(file, ("deepspeed_config", name), message, fix)
        if file.get("mixed_precision") is not None:
            message = "mixed_precision beside deepspeed_config_file: accelerate raises ValueError."
            yield hit(file, ("mixed_precision",), message, fix)


@rule("accelerate.unknown", severity="wrong", raised_by="nobody", evidence=f"{_PLUGIN}; OpenMOSS/MOSS#272")
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key of deepspeed_config that accelerate doesn't hand to DeepSpeed."""
    for file in _deepspeed(files):
        for name in file.get("deepspeed_config"):
            if name not in _FIELDS:
                message = (
                    f"accelerate has no field '{name}', and DeepSpeed never sees "
                    f"it.{nearest(str(name), _FIELDS)}"
                )
                fix = "Put it in a DeepSpeed JSON, and name that as deepspeed_config_file."
                yield hit(file, ("deepspeed_config", name), message, fix)


@rule("accelerate.processes", severity="wrong", raised_by="nobody", evidence=_LAUNCH)
def processes(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Processes that can't be shared evenly over the machines."""
    for file in files.of("accelerate"):
        total, machines = file.get("num_processes"), file.get("num_machines")
        if isinstance(total, int) and isinstance(machines, int) and machines > 1 and total % machines:
            started = total // machines * machines
            message = (
                f"num_processes {total} over {machines} machines: {started} are started, the rest is dropped."
            )
            yield hit(file, ("num_processes",), message, f"Use a multiple of {machines}.")


@rule("accelerate.section", severity="error", raised_by="accelerate", evidence=_PLUGIN)
def section(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A DeepSpeed JSON for accelerate without zero_optimization."""
    for config in _named(plan, files, settings):
        if not config.has(ZERO):
            message = "the file has no zero_optimization: accelerate raises ValueError."
            yield config.hit(ZERO, message, 'Write "zero_optimization": {"stage": 0} at least.')


@rule(
    "accelerate.precision",
    severity="error",
    raised_by="accelerate",
    evidence=f"{_PLUGIN} set_mixed_precision",
)
def precision(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """--mixed_precision that contradicts the DeepSpeed JSON."""
    for file, command in files.launches():
        launcher = command.launcher("accelerate")
        wanted = launcher.options.value("--mixed_precision", "--mixed-precision") if launcher else None
        if wanted not in ("fp16", "bf16"):
            continue
        other = "bf16" if wanted == "fp16" else "fp16"
        assert launcher is not None
        at = launcher.options.position("--mixed_precision", "--mixed-precision")
        for config in configs(plan, files, settings):
            if config.on(f"{other}.enabled"):
                message = f"--mixed_precision {wanted}, but {config.file.name} enables {other}: ValueError."
                yield Hit(file.name, at, message, "Write the same type in both.")


def _named(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Config]:
    """The DeepSpeed JSONs that an accelerate configuration or command names."""
    names = {str(file.get("deepspeed_config", "deepspeed_config_file")) for file in _deepspeed(files)}
    for _, command in files.launches():
        launcher = command.launcher("accelerate")
        names.add(str(launcher.options.value("--deepspeed_config_file") if launcher else None))
    stems = {name.rpartition("/")[2] for name in names}
    for config in configs(plan, files, settings):
        if config.file.name.rpartition("/")[2] in stems:
            yield config
