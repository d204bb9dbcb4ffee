"""What mpirun hands on to other hosts, and how many processes fit on them."""

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


_NAMED = ("--host", "-host", "-H")
_MORE = ("--oversubscribe", "-oversubscribe", "-N", "--npernode", "-npernode", "-ppn", "--hostfile", "-hostfile",
         "--machinefile", "-machinefile", "-f", "-hosts")  # fmt: skip
"""With these the processes may be more, or others count them; -ppn, -f and -hosts are those of other MPIs."""
_HOST = re.compile(r"[\w.-]+(?::(\d{1,5}))?")
_ALLOCATED = re.compile(r"#SBATCH|#PBS|#BSUB|OVERSUBSCRIBE|oversubscribe", re.IGNORECASE)


@rule("launcher.mpi-slots", severity="error", raised_by="nobody", evidence="Open MPI 4.1, run")
def slots(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More processes than the hosts behind mpirun's -H have slots: a host's name alone counts for one."""
    for file, command in files.launches():
        options, program = command.launchers[0].options, command.launchers[0].program
        told = options.complete and options.has(*_NAMED) and not options.has(*_MORE)
        if program != "mpirun" or not told or _ALLOCATED.search(file.text):
            continue
        hosts = [_HOST.fullmatch(each) for each in (options.value(*_NAMED) or "").split(",")]
        count = options.value("-np", "--np", "-n", "-c") or ""
        if not count.isdecimal() or not hosts or not all(hosts):
            continue
        have = sum(int(found[1] or 1) for found in hosts if found)
        if int(count) > have:
            each = -(-int(count) // len(hosts))
            slots_of_all = "1 slot" if have == 1 else f"{have} slots"
            message = f"{count} processes, and -H gives {slots_of_all}: mpirun starts none of them."
            fix = f"Write HOST:{each} for each host."
            yield Hit(file.name, options.position(*_NAMED), message, fix)
