"""Hostfiles beside other hosts, and beside the hardware."""

from __future__ import annotations

from collections.abc import Iterator

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
