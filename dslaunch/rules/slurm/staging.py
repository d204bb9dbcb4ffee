"""Files that the batch script's own shell puts on the disk of the first node, for ranks on all nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import FileSet
from dslaunch.files.script import Command
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs, srun_nodes, steps

_OF_NODE = re.compile(r"(?:/tmp|/var/tmp|/dev/shm|\$\{?SLURM_TMPDIR\}?)/?(?:/.*)?")
"""Folders that each node has for itself."""
_COPIES = frozenset({"cp", "mv", "rsync", "tar", "unzip", "wget", "curl"})
_INTO = ("-C", "-d", "-P", "-O", "-o", "--directory")
"""Options of tar, unzip and wget that name where to."""
_WRITES = re.compile(r"(?<![&\d])>>?[ \t]*([\"']?)([^\s\"'|&;<>]+)\1")
_OUTPUT = re.compile(r"out|save|log|cache|tensorboard|checkpoint|trace|profile|tmp|temp", re.IGNORECASE)
"""Options whose folder a program makes itself."""
_ON_ALL = re.compile(r"\b(?:srun|sbcast|pdsh|clush|mpirun|parallel-ssh)\b")


@rule("slurm.first-node-file", severity="error", raised_by="python", evidence="SLURM 22.05, run")
def first_node_file(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file that is copied or written to a disk of the first node alone, and read by ranks on all nodes."""
    for job in jobs(files):
        if job.file.inside:
            continue
        put = _put(job)
        for command in steps(job) if put else ():
            srun = command.launcher("srun")
            nodes = srun_nodes(job, srun.options) if srun else None
            if nodes is None or nodes < 2:
                continue
            for option, value in _read(command):
                path = next((each for each in put if value == each or value.startswith(f"{each}/")), None)
                if path is not None:
                    at = command.arguments.position(option) if option else command.at
                    message = f"{path} is put on the first of {nodes} nodes alone (line {put[path]})."
                    fix = "Copy it on each node, by srun or sbcast, or keep it on a disk that all nodes share."
                    yield Hit(job.file.name, at, message, fix)


def _put(job: Job) -> dict[str, int]:
    """Paths on the first node's disk that the batch shell writes, and nothing on all nodes, with their lines."""
    values = {each.name: each.value for each in job.script.assignments}
    found: dict[str, int] = {}
    for command in job.script.commands:
        for path in _targets(command):
            found.setdefault(path, command.at.line)
    lines = job.file.lines
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or _ON_ALL.search(line):
            continue
        for each in _WRITES.finditer(line):
            path = re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), each[2])
            found.setdefault(path, number)
    on_all = [line for line in lines if _ON_ALL.search(line)]
    return {
        path: line for path, line in found.items()
        if _OF_NODE.fullmatch(path) and not any(_copies_there(each, path, values) for each in on_all)
    }  # fmt: skip


def _copies_there(line: str, path: str, values: dict[str, str]) -> bool:
    """Whether a line copies to the path on all nodes."""
    text = re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), line)
    return path in text and re.search(r"\b(?:cp|rsync|tar|unzip|sbcast|bash|sh|wget|mkdir)\b", text) is not None


def _targets(command: Command) -> Iterator[str]:
    """Where a command of the batch shell itself copies to."""
    words = [word.text for word in command.words]
    if words[0].rpartition("/")[2] not in _COPIES or command.conditional:
        return
    given = [after.rstrip("/") for option, after in pairwise(words) if option in _INTO]
    if given:
        yield from given
    elif words[0] in ("cp", "mv", "rsync") and len(words) > 2:
        last, source = words[-1], words[-2].rstrip("/").rpartition("/")[2]
        yield last.rstrip("/") if not last.endswith("/") else f"{last}{source}"


def _read(command: CommandLine) -> Iterator[tuple[str, str]]:
    """Options of the program with their values, but for what it writes; the program itself."""
    if command.script is not None:
        yield "", command.script.text
    for flag in command.arguments.flags:
        if not _OUTPUT.search(flag.name):
            yield from ((flag.name, value.rstrip("/")) for value in flag.values)
