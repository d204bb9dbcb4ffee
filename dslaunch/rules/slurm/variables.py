"""Variables in a batch job: those that SLURM sets, and those that reach its steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, pairwise

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import Arguments, is_told
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs, steps

_READ = re.compile(r"\$(?:(SLURM_\w+)|\{(SLURM_\w+)(?::?-)?\})")
_SLOTS = re.compile(rf"\bslots={_READ.pattern}")
"""A line of a hostfile, as a script writes it."""
_SUM = re.compile(r"\w+=[\"']?\$\(\((.*?)\)\)")
_IN_SUM = re.compile(r"\b(SLURM_\w+)\b(?!:?-)")
_GPUS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task")
_SET_BY = {
    "SLURM_CPUS_PER_TASK": (("--cpus-per-task",), ()),
    "SLURM_GPUS": (("--gpus",), _GPUS),
    "SLURM_GPUS_PER_NODE": (("--gpus-per-node",), _GPUS),
    "SLURM_GPUS_PER_TASK": (("--gpus-per-task",), _GPUS),
    "SLURM_NPROCS": (("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"), ()),
    "SLURM_NTASKS": (("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"), ()),
    "SLURM_NTASKS_PER_NODE": (("--ntasks-per-node", "--tasks-per-node", "--ntasks-per-gpu"), ("--ntasks",)),
}
"""By variable: the options that set it, and those with which a script says the same in other words."""


@rule("slurm.unset-variable", severity="error", raised_by="nobody", evidence="SLURM 22.05, run")
def unset(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable of SLURM's that the job's options don't set: it is empty where a launcher wants a number."""
    for job in jobs(files):
        for name, at in chain(_of_steps(job), _of_sums(job), _of_slots(job)):
            yield from _said(job, name, at)


def _of_steps(job: Job) -> Iterator[tuple[str, Position]]:
    """What a shell fills into the commands that start ranks: the batch script's, or one that srun starts."""
    launched = {command.at: command.launchers[0].options for command in steps(job)}
    for command in job.script.commands:
        options = launched.get(command.at)
        for before, word in pairwise(command.words) if options is not None else ():
            of_option = word.text.startswith("-") or before.text.startswith("-")
            in_step = of_option and options is not None and not options.has(*_GPUS, "-G")
            for found in _READ.finditer(word.text):
                name = found[1] or found[2]
                if not word.late or (name.startswith("SLURM_GPUS") and in_step):
                    yield name, word.at


def _of_sums(job: Job) -> Iterator[tuple[str, Position]]:
    """What numbers are reckoned with: bash takes an empty one for 0, or stops at an operand that is missing."""
    lines = job.file.lines
    for each in job.script.assignments:
        if computed := _SUM.match(lines[each.at.line - 1], each.at.column - 1):
            yield from ((found[1], each.at) for found in _IN_SUM.finditer(computed[1]))


def _of_slots(job: Job) -> Iterator[tuple[str, Position]]:
    """What is written behind `slots=`: DeepSpeed's launcher refuses the line without a number."""
    for number, line in enumerate(job.file.lines, 1):
        for found in _SLOTS.finditer(line) if not line.lstrip().startswith("#") else ():
            yield found[1] or found[2], Position(number, found.start() + 1)


def _said(job: Job, name: str, at: Position) -> Iterator[Hit]:
    options, others = _SET_BY.get(name, ((), ()))
    if not options or any(job.directive(each) for each in options):
        return
    instead = next((each for each in others if job.directive(each)), "")
    if instead:
        message = f"${name} is empty: SLURM sets it for {options[0]} alone, and the job gives {instead}."
    else:
        message = f"${name} is empty unless sbatch is called with {options[0]}: no line of the script gives it."
    fix = f"Add #SBATCH {options[0]}=N, or write the number."
    yield Hit(job.file.name, at, message, fix, None if instead else "info")


@rule("slurm.export", severity="error", raised_by="srun", evidence="SLURM 22.05, run")
def export(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--export without ALL: the tasks of srun get the variables it names, and not even PATH."""
    for file, command in files.launches():
        srun = command.launcher("srun")
        own = srun.options.value("--export") if srun else None
        if srun and own is not None and _is_all(own) is False and not _in_container(srun.options):
            message = f"--export={own} without ALL: {_LACKING}."
            yield Hit(file.name, srun.options.position("--export"), message, "Write --export=ALL,NAME=VALUE.")
    for job in jobs(files):
        given = job.directive("--export")
        if given is None or _is_all(given.value) is not False or "SLURM_EXPORT_ENV" in job.file.text:
            continue
        for command in steps(job):
            srun = command.launcher("srun")
            if srun and srun.options.complete and not srun.options.has("--export", *_CONTAINERS):
                who = "sbatch" if given.given else "#SBATCH"
                message = f"{who} --export={given.value} holds for srun in the job too: {_LACKING}."
                fix = "Write `unset SLURM_EXPORT_ENV` in front of srun, or give srun --export=ALL."
                yield Hit(job.file.name, srun.at, message, fix)


_CONTAINERS = ("--container", "--container-image", "--container-name")
_LACKING = "the tasks get no other variable, not even PATH (execve(): No such file or directory)"


def _in_container(options: Arguments) -> bool:
    """Whether the tasks have the variables of an image."""
    return options.has(*_CONTAINERS)


def _is_all(value: str) -> bool | None:
    """Whether --export hands on all variables; None where that isn't told."""
    return "ALL" in value.upper().split(",") if is_told(value.partition("=")[0]) and value else None
