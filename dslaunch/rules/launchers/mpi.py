"""What mpirun hands on to other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.settings import Settings

_OF_OPEN_MPI = ("-x", "-mca", "--mca", "--map-by", "-map-by", "--bind-to", "-bind-to", "--allow-run-as-root")
"""Options that only Open MPI's mpirun has; those of others hand the whole environment on."""
_HOSTS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--host", "-host", "-H")
_SETS = re.compile(r"environ\[[\"']MASTER_ADDR|environ\.setdefault")
"""A script that writes the place itself."""
_NAMES = ("MASTER_ADDR", "MASTER_PORT")


@rule(
    "launcher.mpi-export", severity="error", raised_by="torch",
    evidence="the manual page of Open MPI's mpirun 4.1: -x; torch 2.13 distributed/rendezvous.py",
)  # fmt: skip
def export(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A place to meet that the script exports, and that Open MPI hands to no other host."""
    for file, command, script in launched(files):
        asks = script.called("torch.distributed.init_process_group") and not _SETS.search(script.python.text)
        missing = _kept_back(file, command)
        if asks and missing:
            message = f"{' and '.join(missing)} reach this host alone: the ranks on others raise ValueError."
            fix = f"Add {' '.join(f'-x {name}' for name in missing)}."
            yield Hit(file.name, command.launchers[0].at, message, fix)


def _kept_back(file: File, command: CommandLine) -> list[str]:
    """Names that are set here, and that no -x names."""
    starter = command.launchers[0]
    if starter.program != "mpirun" or not (starter.options.has(*_OF_OPEN_MPI) and starter.options.has(*_HOSTS)):
        return []
    exports = (flag.values for flag in starter.options.flags if flag.name == "-x")
    given = {value.partition("=")[0] for values in exports for value in values}
    set_here = {each.name for each in file.assignments}
    return [name for name in _NAMES if name in set_here and name not in given and starter.options.complete]
