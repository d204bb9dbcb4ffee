"""accelerate's configuration by what starts the processes: torchrun, accelerate, mpirun, a TPU or SageMaker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import FALSE, TRUE, overridden
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_SOURCE = (
    "huggingface/accelerate:src/accelerate/commands/launch.py launch_command, utils/launch.py 1.15.0, run; "
    "commands/config/config_args.py SageMakerConfig 1.8.1, 1.10.1, 1.14.0 and 1.15.0, run"
)
Starter = Literal["torchrun", "deepspeed", "alone", "tpu", "sagemaker"]
MODES = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""What torch.compile takes with inductor (2.13)."""
_LAST_PORT = 65535
_SAGEMAKER = ("NO", "DATA_PARALLEL", "MODEL_PARALLEL")


def starter(file: File) -> Starter:
    """What starts the processes of this configuration; alone: accelerate, with or without mpirun."""
    if file.get("compute_environment") == "AMAZON_SAGEMAKER":
        return "sagemaker"
    kind = str(file.get("distributed_type")).upper()
    if kind in ("DEEPSPEED", "XLA"):
        return "deepspeed" if kind == "DEEPSPEED" else "tpu"
    several = kind.startswith("MULTI_") and kind != "MULTI_CPU"
    return "torchrun" if several or kind in ("FSDP", "MEGATRON_LM") else "alone"


@rule("accelerate.start", severity="error", raised_by="accelerate", evidence=_SOURCE)
def start(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value that the launcher of this distributed_type can't start processes with."""
    given = overridden(files)
    for file in files.of("accelerate"):
        if not isinstance(file.value, dict):
            continue
        names, kind = given.get(file.name, frozenset()), starter(file)
        if kind == "sagemaker":
            yield from _sagemaker(file)
            continue
        yield from _sizes(file, kind, names)
        if kind == "alone":
            yield from _alone(file, names)
        if kind == "tpu" and not isinstance(file.value.get("main_training_function", "main"), str):
            message = f"main_training_function is {shown(file.get('main_training_function'))}: TypeError on a TPU."
            yield hit(file, ("main_training_function",), message, "Name the function, or take it out.")
        yield from _mode(file, kind, names)


def _sizes(file: File, kind: Starter, given: Collection[str]) -> Iterator[Hit]:
    """Numbers that accelerate compares or divides."""
    values = {name: file.value[name] for name in ("num_machines", "num_processes") if name in file.value}
    several = kind in ("torchrun", "deepspeed")
    for name, value in values.items() if kind != "tpu" else ():
        number = isinstance(value, int) or (isinstance(value, float) and kind != "torchrun")
        optional = name == "num_processes" and kind == "alone" and str(file.get("distributed_type")) != "MULTI_CPU"
        whole = number and not (several and name == "num_processes" and isinstance(value, bool))
        if name in given or isinstance(value, str) or whole or (optional and not isinstance(value, list)):
            continue
        message = f"{name} is {shown(value)}: accelerate computes with it, and raises."
        yield hit(file, (name,), message, "Write a whole number.")
    port = file.get("main_process_port")
    fits = isinstance(port, int) and 0 <= port <= _LAST_PORT
    if several and not (port is None or isinstance(port, str) or fits) and "main_process_port" not in given:
        message = f"main_process_port is {shown(port)}, and no port: accelerate tries it, and raises."
        yield hit(file, ("main_process_port",), message, f"Write one up to {_LAST_PORT}, or 0 for a free one.")
    processes = values.get("num_processes")
    if isinstance(processes, int) and processes < -1 and several and "num_processes" not in given:
        message = f"num_processes is {processes}: torchrun starts no negative number of processes."
        yield hit(file, ("num_processes",), message, "Write a whole number.")


def _alone(file: File, given: Collection[str]) -> Iterator[Hit]:
    """What accelerate puts into the environment and onto the command line itself."""
    cpu = file.value.get("use_cpu", False)
    if str(cpu).lower() not in TRUE + FALSE and "use_cpu" not in given:
        message = f"use_cpu is {shown(cpu)}: accelerate reads it as true or false, and raises ValueError."
        yield hit(file, ("use_cpu",), message, "Write true or false.")
    machines, processes = file.get("num_machines"), file.get("num_processes")
    several = isinstance(machines, int) and machines > 1
    for name in ("main_process_ip", "main_process_port"):
        if several and file.get(name) is None and name not in given:
            message = f"{machines} machines without {name}: accelerate asserts that it is given."
            yield hit(file, ("num_machines",), message, f"Give {name}.", severity="error")
    address, hosts = file.get("main_process_ip"), file.get("mpirun_config", "mpirun_hostfile")
    texts: dict[tuple[str, ...], Any] = {("mpirun_config", "mpirun_hostfile"): hosts}
    if several or (isinstance(processes, int) and processes > 1):
        texts["main_process_ip",] = address
    for path, value in texts.items():
        if value is not None and not isinstance(value, str | dict) and path[-1] not in given:
            message = f"{path[-1]} is {shown(value)}, and no text: accelerate raises TypeError."
            yield hit(file, path, message, "Write it in quotes.")


def _mode(file: File, kind: Starter, given: Collection[str]) -> Iterator[Hit]:
    """dynamo_mode, which inductor looks up, and accelerate itself puts into the environment."""
    section = file.get("dynamo_config")
    names = [name for name in ("dynamo_mode", "mode") if isinstance(section, dict) and name in section]
    if not names or kind in ("deepspeed", "tpu") or "dynamo_mode" in given:
        return
    mode = section[names[0]]
    engine = section.get("dynamo_backend", section.get("backend", "no"))
    path = ("dynamo_config", names[0])
    if kind == "alone" and not isinstance(mode, str):
        message = f"{names[0]} is {shown(mode)}, and no text: accelerate raises TypeError."
        yield hit(file, path, message, f"Use one of {listed(MODES)}.")
    elif str(engine).upper() == "INDUCTOR" and str(mode) not in ("", *MODES) and not _is_gap(mode):
        message = f"{names[0]} is {shown(mode)}, and torch.compile has no such: each process raises RuntimeError."
        yield hit(file, path, message, f"Use one of {listed(MODES)}.")


def _is_gap(value: Any) -> bool:
    """A place to be filled in: `{{ mode }}`, `$MODE`, `<mode>`."""
    return isinstance(value, str) and any(mark in value for mark in "${<")


def _sagemaker(file: File) -> Iterator[Hit]:
    for name in ("ec2_instance_type", "iam_role_name"):
        if name not in file.value:
            message = f"compute_environment AMAZON_SAGEMAKER without {name}: accelerate raises TypeError."
            yield hit(file, ("compute_environment",), message, f"Give {name}.")
    kind = file.get("distributed_type")
    if "distributed_type" not in file.value:
        message = "no distributed_type: accelerate launch raises ValueError."
        yield hit(file, (), message, f"Use one of {listed(_SAGEMAKER[1:])}.")
    elif isinstance(kind, str) and kind not in _SAGEMAKER:
        message = f"SageMaker has no distributed_type {kind}: accelerate raises ValueError."
        yield hit(file, ("distributed_type",), message, f"Use one of {listed(_SAGEMAKER)}.")
    elif kind == "NO":
        message = "accelerate adds num_processes to distributed_type NO, and refuses it for SageMaker: ValueError."
        yield hit(file, ("distributed_type",), message, "Use DATA_PARALLEL.")
    message = "accelerate 1.10.1 to 1.15.0 raise AttributeError at each SageMaker configuration; 1.8.1 doesn't."
    fix = "Use accelerate 1.8.1 for SageMaker, or start the job with SageMaker's own library."
    yield hit(file, ("compute_environment",), message, fix, severity="info")
