"""srun and what it starts, against the tasks, GPUs and CPUs that the job asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import Arguments
from dslaunch.files.script import Command
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.hosts import launches
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs, srun_nodes, srun_tasks, steps

_RAN = "SLURM 22.05, run"
_NPROC = ("--nproc_per_node", "--nproc-per-node")
_STARTERS = ("torchrun", "accelerate", "deepspeed")


def _starter(command: CommandLine) -> Launcher | None:
    """The program that starts one process per GPU by itself."""
    found = (command.launcher(name) for name in _STARTERS)
    return next((launcher for launcher in found if launcher is not None), None)


@rule(
    "slurm.tasks-per-node",
    severity="hang",
    raised_by="nobody",
    evidence=f"torch/distributed/run.py 2.13; {_RAN}",
)
def tasks_per_node(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several launchers on one node: each starts all the processes."""
    for job in jobs(files):
        for command in steps(job):
            srun, starter = command.launcher("srun"), _starter(command)
            if srun is None or starter is None:
                continue
            tasks = srun_tasks(job, srun.options)
            if tasks is not None and tasks > 1:
                message = (
                    f"srun starts {tasks} tasks a node, and each is a {starter.spelled} that starts all processes "
                    f"of the node: {tasks} times too many, which fight over GPUs and ports."
                )
                fix = (
                    f"Give {starter.spelled} one task a node: #SBATCH --ntasks-per-node=1, or srun "
                    f"--ntasks={job.nodes or 'NODES'} --ntasks-per-node=1; or start python with a task per GPU."
                )
                yield Hit(job.file.name, srun.at, message, fix)


@rule("slurm.one-task", severity="slow", raised_by="nobody", evidence=_RAN)
def one_task(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun with python and one task on a node of several GPUs: one process runs."""
    for job in jobs(files):
        gpus = job.gpus_per_node
        all_steps = list(steps(job)) if not _RAY.search(job.file.text) else []
        beside = {command.at for command in job.script.commands if command.background or _starts_more(command)}
        for command in all_steps:
            srun = command.launcher("srun")
            plain = command.script is not None and command.launchers[-1].program == "python"
            if srun is None or not plain or not gpus or gpus < 2 or _is_server(command):
                continue
            if command.at in beside or srun.options.has(*_OWN_GPUS) or (len(all_steps) > 1 and _is_small(srun)):
                continue
            if srun_tasks(job, srun.options) == 1:
                message = f"one task a node runs python, and the node has {gpus} GPUs: {gpus - 1} stay idle."
                fix = f"Use --ntasks-per-node={gpus}, or start torchrun --nproc-per-node {gpus}."
                yield Hit(job.file.name, srun.at, message, fix)


_OWN_GPUS = ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task")


def _starts_more(command: Command) -> bool:
    """Whether its words, of an inner shell too, hold what starts a process for each GPU."""
    return any(word.text in _STARTERS for word in command.words)


def _is_small(srun: Launcher) -> bool:
    """A step of one task, beside that of the training."""
    return srun.options.value("--ntasks", "-n") == "1"


_RAY = re.compile(r"\bray\s+start\b")
"""A job whose processes Ray starts, one for each GPU that it is told of."""


def _is_server(command: CommandLine) -> bool:
    """Whether the program starts a process for each GPU itself, as servers of models do."""
    return command.script is not None and command.script.text.partition(".")[0] in ("sglang", "vllm", "ray")


@rule(
    "slurm.one-node", severity="hang", raised_by="nobody", evidence=f"torch/distributed/run.py 2.13; {_RAN}"
)
def one_node(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several nodes, and the launcher runs on the first alone: a batch script is no parallel step."""
    for job in jobs(files):
        nodes = job.nodes
        for command in steps(job):
            starter = _starter(command)
            if (
                starter is None
                or starter.program == "deepspeed"
                or nodes is None
                or nodes < 2
                or command.conditional
            ):
                continue
            if (
                command.launcher("srun") is None
                and command.launcher("mpirun") is None
                and not _remote(command)
            ):
                message = f"{nodes} nodes, but {starter.spelled} without srun runs on the first one alone."
                yield Hit(job.file.name, starter.at, message, f"Put srun in front of {starter.spelled}.")


def _remote(command: CommandLine) -> bool:
    """Whether a wrapper that isn't read may take the command to other nodes."""
    return command.at != command.launchers[0].at


@rule(
    "slurm.srun-deepspeed", severity="error", raised_by="deepspeed launcher",
    evidence="deepspeedai/DeepSpeed:deepspeed/launcher/runner.py main 0.19.8, run; DeepSpeed#2025", since="0.16.0",
)  # fmt: skip
def srun_deepspeed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """deepspeed inside srun on several nodes: each node starts a job of its own."""
    for job in jobs(files):
        for command in steps(job):
            srun, deepspeed = command.launcher("srun"), command.launcher("deepspeed")
            if srun is None or deepspeed is None or deepspeed.options.has("--no_ssh"):
                continue
            nodes = srun_nodes(job, srun.options)
            if nodes is not None and nodes > 1:
                message = (
                    f"srun runs deepspeed on {nodes} nodes: without a hostfile each trains by itself, with one "
                    "each starts all the others."
                )
                fix = "Call deepspeed with a hostfile and no srun, add --no_ssh --node_rank, or use srun torchrun."
                yield Hit(job.file.name, deepspeed.at, message, fix)


@rule(
    "launcher.slurm-allocation", severity="error", raised_by="srun", since="0.16.0",
    evidence=f"deepspeedai/DeepSpeed:deepspeed/launcher/multinode_runner.py SlurmRunner 0.19.8; {_RAN}",
)  # fmt: skip
def slurm_allocation(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """deepspeed --launcher slurm asks srun for a task for each slot: more than the job has CPUs for."""
    held = {job.file.name: job for job in jobs(files)}
    for launch in launches(files):
        job = held.get(launch.file.name)
        if job is None or launch.hosts is None or launch.value(("--launcher",)).lower() != "slurm":
            continue
        tasks, has = sum(launch.hosts.values()), _cpus(job)
        if has is not None and tasks > has:
            message = (
                f"srun -n {tasks}, a task for each slot of the hostfile, in a job of {has} CPUs: "
                "srun refuses the step (More processors requested than permitted)."
            )
            yield launch.hit(("--launcher",), message, f"Ask for {tasks} tasks, such as --ntasks-per-node.")


def _cpus(job: Job) -> int | None:
    """CPUs that the job surely has; None where whole nodes are asked for, or the script doesn't say."""
    tasks, nodes = job.number("--ntasks"), job.nodes
    if tasks is None and job.tasks_per_node is not None and nodes is not None:
        tasks = job.tasks_per_node * nodes
    each = job.number("--cpus-per-task") if job.directive("--cpus-per-task") else 1
    others = ("--exclusive", "--cpus-per-gpu", "--mincpus", "--threads-per-core", "--ntasks-per-core")
    if tasks is None or each is None or any(job.directive(name) for name in others):
        return None
    return tasks * each


@rule("slurm.gpus", severity="error", raised_by="torch", evidence=f"{_RAN}; torch 2.13 cuda.set_device")
def gpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More processes on a node than the job has GPUs there, or no GPU asked for."""
    for job in jobs(files):
        has = job.gpus_per_node
        for command in steps(job):
            starter = _starter(command)
            count = _processes(starter.options) if starter and starter.program == "torchrun" else None
            if starter is None or count is None:
                continue
            if has is not None and count > has:
                message = (
                    f"{count} processes a node, and the job asks for {has} GPUs: invalid device ordinal."
                )
                yield Hit(
                    job.file.name,
                    starter.at,
                    message,
                    f"Ask for {count} GPUs a node, or start {has} processes.",
                )
            total, nodes = job.number("--gpus"), job.nodes
            if has is None and total is not None and nodes and count * nodes > total:
                message = (
                    f"{count} processes on each of {nodes} nodes, and the job asks for {total} GPUs in all: "
                    "invalid device ordinal."
                )
                fix = f"Use --gpus-per-node={count}: --gpus counts those of all nodes."
                yield Hit(job.file.name, starter.at, message, fix)


def _processes(options: Arguments) -> int | None:
    value = options.value(*_NPROC)
    return int(value) if value is not None and value.isdecimal() else None


@rule("slurm.gpus-missing", severity="info", raised_by="nobody", evidence=_RAN)
def gpus_missing(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A job that starts a training and asks for no GPU."""
    for job in jobs(files):
        launch = next((command for command in steps(job) if _starter(command)), None)
        on_line = all(each.given for each in job.script.directives)  # sbatch --wrap
        if launch is not None and not job.wants_gpus and not on_line:
            message = "no #SBATCH line asks for GPUs: only some partitions give them unasked."
            yield Hit(job.file.name, job.script.directives[0].at, message, "Add #SBATCH --gpus-per-node=N.")


@rule(
    "slurm.gpus-per-task",
    severity="error",
    raised_by="sbatch",
    evidence="SLURM 22.05 sbatch --test-only, run",
)
def gpus_per_task(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """GPUs per task times tasks isn't the GPUs per node: sbatch refuses the job."""
    for job in jobs(files):
        each, tasks = job.number("--gpus-per-task"), job.number("--ntasks-per-node", "--tasks-per-node")
        total, at = job.gpus_per_node, job.directive("--gpus-per-task")
        if each and tasks and total and at and each * tasks != total:
            message = f"{each} GPUs a task * {tasks} tasks a node = {each * tasks}, and {total} GPUs a node."
            yield Hit(job.file.name, at.at, message, "Give one of the two, or make them agree.")


@rule(
    "slurm.srun-cpus",
    severity="slow",
    raised_by="nobody",
    evidence="the release notes of SLURM 22.05; 22.05, run",
)
def srun_cpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun doesn't take over --cpus-per-task of the job, since SLURM 22.05: a task gets one CPU."""
    for job in jobs(files):
        asked = job.directive("--cpus-per-task")
        handed_on = any(each.name == "SRUN_CPUS_PER_TASK" for each in job.script.assignments)
        if asked is None or asked.value == "1" or handed_on:
            continue
        for command in steps(job):
            srun = command.launcher("srun")
            if (
                srun
                and not _is_tool(command)
                and srun.options.complete
                and not srun.options.has("--cpus-per-task", "-c", "--exact", "--overlap")
            ):
                message = "since SLURM 22.05 srun doesn't take --cpus-per-task over: a task gets 1 CPU."
                fix = "Export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or give srun --cpus-per-task."
                yield Hit(job.file.name, srun.at, message, fix)


_TOOLS = frozenset({
    "cat", "cp", "date", "df", "echo", "env", "free", "hostname", "ibstat", "ls", "lscpu", "mkdir", "nproc",
    "nvidia-smi", "printenv", "rm", "rocm-smi", "scontrol", "sleep", "true", "uname",
})  # fmt: skip


def _is_tool(command: CommandLine) -> bool:
    """Whether the step only looks at the nodes, or prepares them."""
    return command.script is not None and command.script.text.rpartition("/")[2] in _TOOLS


@rule("slurm.het-step", severity="wrong", raised_by="nobody", evidence=f"the manual page of srun; {_RAN}")
def het_step(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun without --het-group in a heterogeneous job: its tasks run on the first component alone."""
    for job in jobs(files):
        components = max((each.component for each in job.script.directives if each.read), default=0) + 1
        sruns = [
            launcher for command in job.script.launches
            if (launcher := command.launcher("srun")) is not None and not command.components
        ]  # fmt: skip
        everywhere = any(command.components for command in job.script.launches)
        if components > 1 and len(sruns) == 1 and not everywhere and "het-group" not in job.file.text:
            message = f"the job has {components} components, and srun starts tasks on the first alone."
            fix = f"Write srun --het-group=0-{components - 1}."
            yield Hit(job.file.name, sruns[0].at, message, fix)
