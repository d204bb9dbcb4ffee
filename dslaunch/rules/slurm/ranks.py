"""How many nodes and tasks a batch job has, against what its launcher and its ranks are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import launcher_options
from dslaunch.files.switches import SWITCHES
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import started
from dslaunch.rules.accelerate.machines import static
from dslaunch.rules.launchers.torchrun import option
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs, srun_nodes, steps

_RAN = "torchrun 2.13, run; the manual page of srun, SLURM 22.05"
_NODES = ("--nodes", "-N")
_OF_NODE = re.compile(r"[\"']?\\?\$\{?(SLURM_LOCALID|SLURM_NODEID|OMPI_COMM_WORLD_LOCAL_RANK)\}?[\"']?")
_OF_ALL = re.compile(r"[\"']?\\?\$\{?SLURM_PROCID\}?[\"']?")


def _in_background(job: Job, command: CommandLine) -> bool:
    return any(each.background for each in job.script.commands if each.at == command.at)


@rule("slurm.node-count", severity="hang", raised_by="nobody", evidence=_RAN)
def node_count(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun starts torchrun or accelerate on fewer nodes than it waits for, or on more."""
    by_accelerate = {
        (each.file.name, each.command.at): each for each in started(files)
        if static(each) and each.flag("num_machines") is not None
    }  # fmt: skip
    for job in jobs(files):
        for command in steps(job):
            srun, launcher = command.launcher("srun"), command.launcher("torchrun")
            asked, flag = option(launcher, "nnodes") if launcher else None, "--nnodes"
            if launcher is None and (start := by_accelerate.get((job.file.name, command.at))):
                launcher, asked, flag = start.launcher, start.value("num_machines"), "--num_machines"
            if srun is None or launcher is None or asked is None or not re.fullmatch(r"\d+(:\d+)?", asked):
                continue
            nodes = srun_nodes(job, srun.options)
            told = srun.options.has(*_NODES) or job.directive("--nodes") is not None
            alone = srun.options.value("--ntasks", "-n") == "1" and len(list(steps(job))) == 1
            if alone and not command.conditional and not _in_background(job, command):
                nodes = 1
            elif nodes is None or not told or srun.options.has("--ntasks", "-n", "--nodelist", "-w"):
                continue
            least, most = int(asked.partition(":")[0]), int(asked.rpartition(":")[2])
            at = launcher.options.position(flag)
            fix = f"Write {flag}={nodes}, or start it on {most}."
            if nodes < least:
                where = f"{nodes} nodes" if nodes > 1 else "one node"
                message = f"srun starts {launcher.program} on {where}, and it waits for {least}."
                yield Hit(job.file.name, at, message, fix)
            elif nodes > most:
                message = f"srun starts {launcher.program} on {nodes} nodes, of which {most} train."
                yield Hit(job.file.name, at, message, fix, "wrong")


@rule(
    "slurm.rank", severity="error", raised_by="torch", evidence="the manual page of srun, SLURM 22.05; torch 2.13"
)
def rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """RANK from a number that other tasks have too, or a WORLD_SIZE that isn't the number of tasks."""
    for job in jobs(files):
        nodes, tasks = job.nodes, job.tasks_per_node
        given = job.directive("--nodes") is not None
        counted = False
        for each in job.script.assignments:
            found = _OF_NODE.fullmatch(each.value) if each.name == "RANK" else None
            counted = counted or (each.name == "RANK" and _OF_ALL.fullmatch(each.value) is not None)
            several = given and (nodes or 0) > 1 and not _on_one_node(job, each.at.line)
            of_node = found is not None and found[1] != "SLURM_NODEID" and several
            of_nodes = found is not None and found[1] == "SLURM_NODEID" and (tasks or 0) > 1
            if found and (of_node or of_nodes):
                where = "on each node" if of_node else "for each task of a node"
                message = f"RANK={each.value} counts anew {where}: several tasks have each number."
                fix = "Write RANK=$OMPI_COMM_WORLD_RANK." if "OMPI" in found[1] else "Write RANK=$SLURM_PROCID."
                yield Hit(job.file.name, each.at, message, fix)
        yield from _world(job) if counted else ()


def _on_one_node(job: Job, line: int) -> bool:
    """Whether a step of one node begins in this line, or above it without an end."""
    before = [each for each in job.script.commands if each.at.line <= line]
    if not before or before[-1].words[0].text != "srun":
        return False
    options, _ = launcher_options(before[-1].words[1:], SWITCHES["srun"], joined=True)
    return srun_nodes(job, options) == 1


def _world(job: Job) -> Iterator[Hit]:
    total = job.number("--ntasks")
    if total is None and job.nodes and job.tasks_per_node and job.directive("--nodes"):
        total = job.nodes * job.tasks_per_node
    for each in job.script.assignments:
        if each.name == "WORLD_SIZE" and each.value.isdecimal() and total and int(each.value) != total:
            severity: Severity = "error" if int(each.value) < total else "hang"
            message = f"WORLD_SIZE={each.value}, and the job has {total} tasks, each with a RANK of its own."
            yield Hit(job.file.name, each.at, message, "Write WORLD_SIZE=$SLURM_NTASKS.", severity)
