"""What DeepSpeed's launcher adds to a job or counts on: network, cores, --local_rank, the numbers of ranks."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word
from dslaunch.files.megatron import is_megatron
from dslaunch.files.position import Position
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.hosts import HOSTFILE, launches
from dslaunch.rules.registry import Edit, Hit, Severity, rule
from dslaunch.rules.scripts.clis import refuses
from dslaunch.rules.scripts.launched import started
from dslaunch.rules.scripts.tree import Script
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import jobs, srun_tasks

_MULTI = "deepspeedai/DeepSpeed:deepspeed/launcher/multinode_runner.py OpenMPIRunner.get_cmd 0.19.8, run"
_NUMA = "deepspeedai/DeepSpeed:deepspeed/utils/numa.py get_numactl_cmd 0.19.8"
_LAUNCH = "deepspeedai/DeepSpeed:deepspeed/launcher/launch.py main 0.19.8, run"
_BLANK_END = re.compile(r"(?<!\\)\\[ \t]+$")
_INIT = "deepspeedai/DeepSpeed:deepspeed/comm/comm.py mpi_discovery 0.19.8"


@rule("launcher.openmpi-interface", severity="info", raised_by="nobody", evidence=_MULTI)
def interface(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--launcher openmpi, which binds MPI to eth0 unless it is told otherwise."""
    for launch in launches(files):
        told = "btl_tcp_if_include" in (launch.launcher.options.value("--launcher_args") or "")
        several = launch.hosts is None or len(launch.hosts) > 1
        if launch.value(("--launcher",)).lower() == "openmpi" and launch.has(*HOSTFILE) and several and not told:
            message = "DeepSpeed adds --mca btl_tcp_if_include eth0: mpirun stops where a host has no eth0."
            fix = 'Give --launcher_args "-mca btl_tcp_if_include NAME" with the interface of these hosts.'
            yield launch.hit(("--launcher",), message, fix)


@rule("launcher.bind-cores", severity="info", raised_by="deepspeed launcher", evidence=_NUMA)
def bind_cores(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--bind_cores_to_rank on one node: it needs numactl, and refuses KMP_AFFINITY."""
    for launch in launches(files):
        if not launch.has("--bind_cores_to_rank") or launch.has(*HOSTFILE):
            continue
        names = {found.name for found in (*launch.command.environment, *launch.file.assignments)}
        if "KMP_AFFINITY" in names:
            message = "--bind_cores_to_rank beside KMP_AFFINITY: ValueError when a rank is started."
            fix = "Unset KMP_AFFINITY."
            yield launch.hit(("--bind_cores_to_rank",), message, fix, "error")
        else:
            message = "--bind_cores_to_rank starts each rank under numactl: FileNotFoundError without it."
            yield launch.hit(("--bind_cores_to_rank",), message, "Install numactl on every node.")


@rule("env.rank", severity="error", raised_by="deepspeed.initialize", evidence=_INIT)
def rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """RANK or LOCAL_RANK as one number for all the tasks that mpirun or srun start."""
    held = {job.file.name: job for job in jobs(files)}
    for file, command in files.launches():
        programs = [launcher.program for launcher in command.launchers]
        if programs[-1] != "python" or programs[0] not in ("mpirun", "srun") or not file.holds("RANK="):
            continue
        exported = (
            Assignment(name, text, flag.at, literal=True)
            for flag in command.launchers[0].options.flags if flag.name == "-x"
            for name, equals, text in (word.partition("=") for word in flag.values) if equals
        )  # fmt: skip
        job = held.get(file.name)
        own = job is not None and srun_tasks(job, command.launchers[0].options) == 1
        parted = any(_PARTS.search(word.text) for word in _late(file, command))
        local = not (own or parted or file.holds(_ONE_GPU))
        for found in (*_before(file, command), *_inside(file, command), *exported):
            wanted = found.name == "RANK" or (found.name == "LOCAL_RANK" and local)
            if wanted and found.literal and found.value.isdecimal():
                message = f"{found.name}={found.value} in every task: all of them take themselves for one."
                yield Hit(file.name, found.at, message, f"Set {found.name} within each task, or not at all.")


_ONE_GPU = re.compile(r"--gpus-per-task[= ](?:\w+:)?1\b|--gpu-bind[= ](?:single|per_task|map_gpu)")
"""With these each task sees one GPU, whose number is 0."""
_PARTS = re.compile(r"_VISIBLE_DEVICES=[\"']?\\?\$\{?(?:SLURM_LOCALID|OMPI_COMM_WORLD_LOCAL_RANK)")
"""So does this in the text that a task runs; in the batch script SLURM sets the variable anew for each task."""


def _before(file: File, command: CommandLine) -> Iterator[Assignment]:
    yield from command.environment
    others = {found.at for each in file.value.commands for found in each.environment}
    inner = {word.at for each in file.value.commands for word in each.words if word.late}
    yield from (
        found for found in file.assignments
        if found.at < command.at and found.at not in others and found.at not in inner
    )  # fmt: skip


def _inside(file: File, command: CommandLine) -> Iterator[Assignment]:
    """Those in a text for a shell that each task runs."""
    late = {word.at for word in _late(file, command)}
    yield from (found for found in file.assignments if found.at in late)


def _late(file: File, command: CommandLine) -> Iterator[Word]:
    """The words of a text that each task's own shell reads."""
    same = (each for each in file.value.commands if each.at == command.at)
    return (word for each in same for word in each.words if word.late)


@rule(
    "launcher.line-end", severity="wrong", raised_by="nobody",
    evidence="the manual page of bash 5.2, QUOTING; run",
)  # fmt: skip
def line_end(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A blank behind the backslash of a long command: it ends there, and the rest isn't part of it."""
    for file, script in files.scripts():
        lines, launched = file.lines, {each.at for each in script.launches if is_megatron(each)}
        begun = sorted({each.at for each in script.commands} | {each.at for each in script.launches})
        for number, (line, following) in enumerate(pairwise(lines), 1):
            found = _BLANK_END.search(line)
            if found and following.lstrip().startswith(("-", "$", '"$')) and not line.lstrip().startswith("#"):
                at = Position(number, found.start() + 1)
                word = following.split()[0]
                message = f"a blank behind the backslash: the command ends here, and {word} is run by itself."
                severity: Severity | None = None
                if begun and begun[0] < at and begun[bisect_right(begun, at) - 1] in launched:
                    message += " Megatron gets a blank for an argument: its parser prints its usage and exits."
                    severity = "error"
                yield Hit(file.name, at, message, "Delete the blank.", severity, edit=Edit(at, found[0], "\\"))


@rule("script.local-rank-argument", severity="error", raised_by="python", evidence=_LAUNCH)
def local_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script that doesn't take --local_rank, which DeepSpeed's launcher hands to it."""
    found = {
        script.path: script for launch in launches(files)
        if not launch.has("--no_local_rank") and (script := started(files, launch.command)) is not None
    }  # fmt: skip
    for script in found.values():
        for parser in _own_parsers(script):
            message = "the launcher adds --local_rank=N, and this parser doesn't know it: unrecognized arguments."
            fix = 'Add parser.add_argument("--local_rank", type=int), or start with --no_local_rank.'
            yield Hit(script.path, script.python.at(parser), message, fix)
        for place, library in refuses(script, "local_rank"):
            message = f"the launcher adds --local_rank=N, and {library} doesn't know it here: the script exits."
            fix = f"{_TAKES[library]}, or start with --no_local_rank."
            yield Hit(script.path, script.python.at(place), message, fix)


_TAKES: Mapping[str, str] = {
    "click": 'Add @click.option("--local_rank", type=int)',
    "fire": "Give the function an argument local_rank",
    "typer": 'Add an argument local_rank: int = typer.Option(-1, "--local_rank")',
    "tyro": "Give it an argument local_rank",
}
"""click and typer know local_rank as --local-rank where no name is given."""


_FROM_ENVIRONMENT = re.compile(
    r"(?:environ(?:\.get)?|getenv)\s*[\[(]\s*[\"']LOCAL_RANK[\"']|\blocal_rank\s*=(?!=)"
)
"""Where a script takes it from the environment; an argument of the parser it isn't."""


def _own_parsers(script: Script) -> Iterator[ast.Call]:
    """Parsers of which the file shows every argument, where it names no local rank at all."""
    text = _FROM_ENVIRONMENT.sub("", script.python.text).lower()
    if "local_rank" in text or "local-rank" in text or script.methods("parse_known_args", "HfArgumentParser"):
        return
    names = script.assigned("argparse.ArgumentParser")
    passed = {
        each.id for call in script.calls if call.name != "deepspeed.add_config_arguments"
        for each in (*call.node.args, *(keyword.value for keyword in call.node.keywords))
        if isinstance(each, ast.Name)
    }  # fmt: skip
    parsed = {call.owner for call in script.methods("parse_args")}
    for call in script.called("argparse.ArgumentParser"):
        if names & parsed and not names & passed and call.keyword("parents") is None:
            yield call.node
