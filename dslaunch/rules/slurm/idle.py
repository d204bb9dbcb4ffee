"""Processes of a job against its GPUs: too few of them, or more than there are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import Started, started
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs, srun_tasks, steps

_SHARED = re.compile(r"CUDA_VISIBLE_DEVICES|\bvllm\b|\bray\b|\bsglang\b|--overlap\b", re.IGNORECASE)
"""A job that gives its GPUs out itself, or to servers as well."""
_RANKS = re.compile(r"MASTER_(?:ADDR|PORT)|SLURM_PROCID|--launcher[= ]+[\"']?slurm")
_NPROC = {"torchrun": ("--nproc_per_node", "--nproc-per-node"), "deepspeed": ("--num_gpus",)}


@rule("slurm.idle-gpus", severity="slow", raised_by="nobody", evidence="torchrun 2.13, accelerate 1.15.0, run")
def idle(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A launcher that starts fewer processes on a node than the job has GPUs there."""
    by_accelerate = {(start.file.name, start.command.at): start for start in started(files)}
    for job in jobs(files):
        launches = list(steps(job))
        gpus = job.gpus_per_node or _of_all(job)
        if not gpus or len(launches) != 1 or launches[0].conditional or _SHARED.search(job.file.text):
            continue
        command = launches[0]
        launcher = next((found for name in _NPROC if (found := command.launcher(name))), None)
        start = by_accelerate.get((job.file.name, command.at))
        launcher = launcher or (start.launcher if start else None)
        count = _of_accelerate(start) if start else _count(launcher) if launcher else None
        if launcher is not None and count is not None and 0 < count < gpus and _alone(job, command):
            several = "processes" if count > 1 else "process"
            message = f"{launcher.spelled} starts {count} {several} on a node of {gpus} GPUs: the rest stays idle."
            total = f"--num_processes {gpus * (job.nodes or 1)}, those of all nodes" if start else f"{gpus}"
            yield Hit(job.file.name, launcher.at, message, f"Start {total}, or ask for {count} a node.")


def _of_all(job: Job) -> int | None:
    """GPUs of a node where --gpus gives those of all nodes."""
    total, nodes = job.number("--gpus"), job.nodes
    return total // nodes if total and nodes and total % nodes == 0 else None


def _count(launcher: Launcher) -> int | None:
    value = launcher.options.value(*_NPROC[launcher.program])
    return int(value) if value is not None and value.isdecimal() else None


def _of_accelerate(start: Started) -> int | None:
    """Processes on one machine."""
    count, machines = start.number("num_processes"), start.number("num_machines")
    machines = 1 if machines is None and start.flag("num_machines") is None else machines
    return count // machines if count is not None and machines else None


def _alone(job: Job, command: CommandLine) -> bool:
    """Whether the node runs this launcher once."""
    srun = command.launcher("srun")
    return srun is None or srun_tasks(job, srun.options) == 1


@rule(
    "slurm.tasks-over-gpus", severity="error", raised_by="torch",
    evidence="SLURM 22.05, run; torch 2.13 cuda.set_device; open-mmlab/mmdetection#7289",
)  # fmt: skip
def tasks_over_gpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun starts more ranks on a node than the job has GPUs there."""
    for job in jobs(files):
        gpus = job.gpus_per_node
        for command in steps(job) if gpus and _RANKS.search(job.file.text) else ():
            srun, script = command.launcher("srun"), command.script
            tasks = srun_tasks(job, srun.options) if srun else None
            plain = command.launchers[-1].program == "python" and script is not None and is_told(script.text)
            if srun is None or tasks is None or gpus is None or not plain or tasks <= gpus:
                continue
            has = f"{gpus} GPU{'s' if gpus > 1 else ''}"
            message = f"{tasks} ranks a node, and the job asks for {has} there: invalid device ordinal."
            fix = f"Ask for --gpus-per-node={tasks}, or use --ntasks-per-node={gpus}."
            yield Hit(job.file.name, srun.at, message, fix)
