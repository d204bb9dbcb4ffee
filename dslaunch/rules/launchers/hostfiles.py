"""Hostfiles beside other hosts, and beside the hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.known import gpus_per_node
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_RUNNER = "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py 0.19.8"
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@rule("hostfile.names", severity="wrong", raised_by="nobody", evidence=f"{_RUNNER}; DeepSpeedExamples#575")
def names(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Names that mean another host on each node, or that a filter can't name."""
    for file in files.of("hostfile"):
        for line in file.value:
            if line.host in _HERE and len(file.value) > 1:
                message = (
                    f"{line.host} beside other hosts: each node takes it for itself, and MASTER_ADDR "
                    "may be unreachable."
                )
                yield Hit(
                    file.name, Position(line.line, 1), message, "Write the name that the other nodes know."
                )
            elif "@" in line.host:
                message = (
                    f"{line.host}: --include and --exclude split at '@', and mpirun and srun take no user."
                )
                fix = "Write the host alone, and the user in ~/.ssh/config."
                yield Hit(file.name, Position(line.line, 1), message, fix, severity="info")


@rule("hostfile.gpus", severity="error", raised_by="nobody", evidence=f"{_RUNNER}, launch.py 0.19.8")
def gpus(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More slots than a node has GPUs."""
    have = max(plan.cluster.slots, default=plan.cluster.gpus_per_node) if plan else _of_job(files)
    for file in files.of("hostfile") if have is not None else ():
        for line in (line for line in file.value if line.host and line.slots > have):
            message = (
                f"{line.host} has slots={line.slots}, and a node has {have} GPUs: invalid device "
                "when it starts."
            )
            yield Hit(file.name, Position(line.line, 1), message, f"Write slots={have}.")


def _of_job(files: FileSet) -> int | None:
    """GPUs of a node as the only batch script asks for them; None where that isn't told."""
    asked = {gpus_per_node(script) for _, script in files.scripts() if script.directives}
    return asked.pop() if len(asked) == 1 else None


_FIRST_LINE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>\w*(?:ADDR|HEAD|HOST|MASTER|NODE|RANK0)\w*)=["']?(?:\$\(|`)
        (?:head[ ](?:-n[ ]?)?-?1|sed[ ]-n[ ]["']?1p["']?)[ ]+["']?(?P<file>[\w./${}-]+)["']?[)`]""",
    re.MULTILINE | re.VERBOSE | re.IGNORECASE,
)


_EACH_WORD = re.compile(
    r"^[ \t]*for[ ]\w+[ ]in[ ](?:\$\(|`)cat[ ]+[\"']?(?P<file>[\w./${}-]+)[\"']?[)`]", re.MULTILINE
)


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda each: values.get(each[1], each[0]), text)


@rule("launcher.hostfile-line", severity="error", raised_by="torchrun", evidence="bash 5.2, torchrun 2.13, run")
def first_line(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An address that is a whole line of a hostfile: behind the name stand its slots."""
    hosts = (file for file in files.of("hostfile") if any(line.host for line in file.value))
    slots = {file.name.rpartition("/")[2] for file in hosts}
    for file, script in files.scripts():
        values = {each.name: each.value for each in script.assignments}
        for found in _FIRST_LINE.finditer(file.text) if slots else ():
            if _filled(found["file"], values).rpartition("/")[2] in slots:
                message = f"{found['name']} is the whole line, `HOST slots=N`: the launcher gets a word too many."
                at = file.places.position(found.start("name"))
                yield Hit(file.name, at, message, "Add | cut -d' ' -f1 to it.")
        for found in _EACH_WORD.finditer(file.text) if slots else ():
            if _filled(found["file"], values).rpartition("/")[2] in slots:
                message = "the loop goes through the words of lines `HOST slots=N`: slots=N is taken for a host."
                at = file.places.position(found.start("file"))
                yield Hit(file.name, at, message, "Write $(cut -d' ' -f1 FILE) for it.")
