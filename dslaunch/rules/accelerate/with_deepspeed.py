"""accelerate's configuration, where it starts DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.config import unread
from dslaunch.rules.accelerate.launch import FALSE, TRUE
from dslaunch.rules.accelerate.starts import starter
from dslaunch.rules.deepspeed.coercion import number
from dslaunch.rules.deepspeed.config import ZERO, Config, configs
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.huggingface.trainer import arguments
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.scripts.launched import started
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
        if str(section.get("deepspeed_config_file", "none")) in ("none", "None"):
            continue  # as accelerate's own questions write it where no file is named
        for name in (name for name in section if name in _IN_JSON):
            message = f"{name} beside deepspeed_config_file: accelerate raises ValueError."
            yield hit(file, ("deepspeed_config", name), message, fix)
        if file.get("mixed_precision") is not None:
            message = "mixed_precision beside deepspeed_config_file: accelerate raises ValueError."
            yield hit(file, ("mixed_precision",), message, fix)


@rule("accelerate.unknown", severity="wrong", raised_by="nobody", evidence=f"{_PLUGIN}; OpenMOSS/MOSS#272")
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key in a section of accelerate's configuration that nothing reads."""
    for file in _deepspeed(files):
        for name in file.get("deepspeed_config"):
            if name not in _FIELDS:
                message = (
                    f"accelerate has no field '{name}', and DeepSpeed never sees "
                    f"it.{nearest(str(name), _FIELDS)}"
                )
                fix = "Put it in a DeepSpeed JSON, and name that as deepspeed_config_file."
                yield hit(file, ("deepspeed_config", name), message, fix)
    for file in files.of("accelerate"):
        for section, name, until, near in unread(file):
            if until:
                message = f"accelerate doesn't read {name} in {section} any more: the last version was {until}."
                yield hit(file, (section, name), message, "Take it out.", severity="info")
            else:
                message = f"accelerate reads no {name} in {section}, and says nothing.{near}"
                yield hit(file, (section, name), message, "Correct it, or take it out.")


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


_DEVICES = ("none", "cpu", "nvme")
_DEVICE_NAMES = ("offload_optimizer_device", "offload_param_device")
_VALUES: Mapping[str, tuple[object, ...]] = {"zero_stage": (0, 1, 2, 3), **dict.fromkeys(_DEVICE_NAMES, _DEVICES)}
_LOCAL = re.compile(r"localhost|127(?:\.\d+){3}|::1")


@rule("accelerate.value", severity="error", raised_by="accelerate", evidence=f"{_LAUNCH}, run; {_PLUGIN}")
def value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A number format, a stage or a device that accelerate, or DeepSpeed behind it, doesn't have."""
    for file in files.of("accelerate"):
        if starter(file) == "tpu":
            continue  # its processes are not told
        precision, types = file.get("mixed_precision"), ("no", "fp16", "bf16", "fp8")
        if isinstance(precision, bool):
            message = f"mixed_precision is {shown(precision)} to YAML, which takes no for it: accelerate raises."
            yield hit(file, ("mixed_precision",), message, "Write 'no' in quotes, or a number format.")
        elif precision is not None and str(precision).lower() not in types:
            message = f"mixed_precision is {shown(precision)}: accelerate raises ValueError."
            yield hit(file, ("mixed_precision",), message, f"Use one of {', '.join(types)}.")
    for file in _deepspeed(files):
        for name, allowed in _VALUES.items():
            given = file.get("deepspeed_config", name)
            if name in _DEVICE_NAMES and given == "auto":
                message = f"{name} is auto: DeepSpeed's parser drops the word, and nothing is offloaded."
                fix = "Write cpu, nvme or none."
                yield hit(file, ("deepspeed_config", name), message, fix, severity="wrong", raised_by="nobody")
            elif given is not None and str(given) not in map(str, allowed):
                message = f"{name} is {shown(given)}: accelerate hands it on, and DeepSpeed refuses it."
                fix = f"Use one of {', '.join(map(str, allowed))}."
                yield hit(file, ("deepspeed_config", name), message, fix)
        yield from _converted(file)


def _converted(file: File) -> Iterator[Hit]:
    """Values that the plugin in each process makes a truth or a number of."""
    section = file.get("deepspeed_config")
    told = {name: each for name, each in section.items() if not isinstance(each, str) or is_told(each)}
    flag, clip = told.get("zero3_init_flag"), told.get("gradient_clipping")
    if flag is not None and str(flag).lower() not in (*TRUE, *FALSE):
        message = f"zero3_init_flag is {shown(flag)}, no truth: accelerate raises ValueError in each process."
        yield hit(file, ("deepspeed_config", "zero3_init_flag"), message, "Write true or false.")
    if clip is not None and clip != "auto" and (isinstance(clip, bool) or number(clip) is None):
        message = f"gradient_clipping is {shown(clip)}, no number: accelerate raises ValueError in each process."
        fix = "Write a number, or leave it out."
        yield hit(file, ("deepspeed_config", "gradient_clipping"), message, fix)


@rule("accelerate.address", severity="hang", raised_by="nobody", evidence=f"{_LAUNCH}, run")
def address(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several machines, and a main_process_ip that each takes for itself, or none.

    A plan's own launch line gives the address.
    """
    if plan:
        return
    for file in files.of("accelerate"):
        machines, given = file.get("num_machines"), file.get("main_process_ip")
        if not isinstance(machines, int) or machines < 2:
            continue
        if given is not None and _LOCAL.fullmatch(str(given)):
            message = f"main_process_ip {given} is each of the {machines} machines itself: they never meet."
            yield hit(file, ("main_process_ip",), message, "Give the address of machine 0 as the others see it.")
        elif given is None and str(file.get("distributed_type")).upper() in ("MULTI_GPU", "FSDP"):
            message = f"{machines} machines without main_process_ip: they are to meet at a host called None."
            fix = "Give main_process_ip here, or --main_process_ip on the command line."
            launched = any(command.launcher("accelerate") for _, command in files.launches())
            yield hit(file, ("num_machines",), message, fix, severity=None if launched else "info")


@rule("accelerate.kind", severity="wrong", raised_by="nobody", evidence=f"{_LAUNCH}, run")
def kind(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A section for another distributed_type than the one that is chosen: nothing reads it."""
    for file in files.of("accelerate"):
        chosen = str(file.get("distributed_type")).upper()
        for name, wanted in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
            if file.get(name) and chosen != wanted and file.get("distributed_type") is not None:
                message = f"{name} under distributed_type {chosen}: accelerate doesn't read it."
                yield hit(file, (name,), message, f"Write distributed_type: {wanted}, or delete {name}.")


@rule("accelerate.section", severity="error", raised_by="accelerate", evidence=_PLUGIN)
def section(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A DeepSpeed JSON for accelerate or the Trainer without zero_optimization."""
    unread = any(started(files, command) is None for _, command in files.launches())
    of_command = unread and not files.of("accelerate", "hf_arguments")
    for config in _named(plan, files, settings):
        if not config.has(ZERO):
            by_script = of_command and not settings.huggingface
            message = "the file has no zero_optimization: accelerate raises ValueError."
            if by_script:
                message = "the file has no zero_optimization: ValueError where transformers' Trainer reads it."
            fix = 'Write "zero_optimization": {"stage": 0} at least.'
            yield config.hit(ZERO, message, fix, severity="info" if by_script else None)


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
    """The DeepSpeed JSONs that accelerate's configuration or command names, or the Trainer's arguments."""
    names = {str(file.get("deepspeed_config", "deepspeed_config_file")) for file in _deepspeed(files)}
    for _, command in files.launches():
        launcher = command.launcher("accelerate")
        names.add(str(launcher.options.value("--deepspeed_config_file") if launcher else None))
    trainers = arguments(files).get("deepspeed")
    names.add(str(trainers.value if trainers else None))
    stems = {name.rpartition("/")[2] for name in names}
    for config in configs(plan, files, settings):
        if config.file.name.rpartition("/")[2] in stems:
            yield config
