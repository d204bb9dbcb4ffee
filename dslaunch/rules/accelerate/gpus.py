"""The GPUs that accelerate shows its processes, against their number."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import overridden
from dslaunch.rules.accelerate.starts import starter
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_SEVERAL = ("--multi_gpu", "--multi-gpu", "--use_fsdp", "--use-fsdp", "--use_deepspeed", "--use-deepspeed")
_FIX = "Name a GPU for each process of a node, lower num_processes, or write all."


@rule(
    "accelerate.gpu-count", severity="error", raised_by="torch",
    evidence="huggingface/accelerate:src/accelerate/utils/launch.py prepare_multi_gpu_env 1.15.0, run",
)  # fmt: skip
def count(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Fewer GPUs in gpu_ids than accelerate starts processes on a node."""
    given = overridden(files)
    for file in files.of("accelerate"):
        ids, names = file.get("gpu_ids"), given.get(file.name, frozenset())
        if isinstance(file.value, dict) and starter(file) in ("torchrun", "deepspeed") and not file.get("use_cpu"):
            said = None if names & {"gpu_ids", "num_processes", "num_machines"} else _said(
                ids, file.get("num_processes"), file.get("num_machines") or 1
            )
            if said:
                yield hit(file, ("gpu_ids",), said, _FIX)
    for file, command in files.launches():
        launcher = command.launcher("accelerate")
        if launcher is None or not launcher.options.has(*_SEVERAL):
            continue
        ids, processes, machines = (
            launcher.options.value(f"--{name}", f"--{name.replace('_', '-')}")
            for name in ("gpu_ids", "num_processes", "num_machines")
        )
        told = ids and is_told(ids) and processes and processes.isdecimal() and (machines or "1").isdecimal()
        if told and processes and (said := _said(ids, int(processes), int(machines or 1))):
            yield Hit(file.name, launcher.options.position("--gpu_ids", "--gpu-ids"), said, _FIX)


def _said(ids: object, processes: object, machines: object) -> str:
    """What comes of it; empty where there are enough, or it isn't told."""
    if not isinstance(ids, str) or type(processes) is not int or type(machines) is not int or machines < 1:
        return ""
    named = [each for each in ids.split(",") if each.strip()]
    if not all(each.strip().isdecimal() for each in named) or not 1 < len(named) < processes // machines:
        return ""
    return (
        f"gpu_ids shows {len(named)} GPUs to each of the {processes // machines} processes of a node: the last "
        f"{processes // machines - len(named)} of these stop at invalid device ordinal."
    )
