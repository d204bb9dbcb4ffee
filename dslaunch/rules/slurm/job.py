"""What a batch script asks SLURM for, in one value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments
from dslaunch.files.heredoc import Heredoc
from dslaunch.files.script import Directive, ShellScript
from dslaunch.rules.slurm.options import long_name

_GRES = re.compile(r"(?:gres[:/])?gpu(?::[A-Za-z][\w.-]*)?(?:[:=](\d+))?")
_DIRECTIVE = re.compile(r"#SBATCH\s+\S")
_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")


@dataclass(frozen=True)
class Job:
    """A script with `#SBATCH` lines. Numbers are None where the script doesn't say, or the shell would fill in."""

    file: File
    script: ShellScript

    def directive(self, name: str) -> Directive | None:
        """The last directive of this full name that sbatch reads for the job's first component."""
        read = (each for each in reversed(self.script.directives) if each.read and not each.component)
        return next((each for each in read if long_name(each.name) == name), None)

    def number(self, *names: str) -> int | None:
        """The number that the first of these directives gives."""
        for name in names:
            found = self.directive(name)
            if found is not None:
                return int(found.value) if found.value.isdecimal() else None
        return None

    @property
    def nodes(self) -> int | None:
        """Nodes; 1 where the script doesn't say."""
        return self.number("--nodes") if self.directive("--nodes") else 1

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks that srun starts on a node; 1 where the script doesn't say."""
        given = self.number("--ntasks-per-node", "--tasks-per-node")
        if given is not None:
            return given
        tasks, nodes = self.number("--ntasks"), self.nodes
        if tasks is not None and nodes:
            return tasks // nodes if tasks % nodes == 0 else None
        return 1 if self.directive("--ntasks") is None else None

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of a node."""
        found = self.directive("--gpus-per-node")
        if found is not None:
            match = _COUNT.fullmatch(found.value)
            return int(match[1]) if match else None
        gres = self.directive("--gres")
        match = _GRES.fullmatch(gres.value) if gres else None
        return (int(match[1]) if match[1] else 1) if match else None

    @property
    def wants_gpus(self) -> bool:
        """Whether some option asks for GPUs, or leaves it to the partition or the whole node."""
        names = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--exclusive",
                 "--tres-per-task")  # fmt: skip
        return any(self.directive(name) for name in names)


def jobs(files: FileSet) -> Iterator[Job]:
    """The batch scripts among the files, and what another script hands to sbatch with options."""
    for file, script in files.scripts():
        held = {line for command in script.commands if command.heredoc for line in _lines(command.heredoc)}
        lines = (number for number, line in enumerate(file.lines, 1) if _DIRECTIVE.match(line))
        if any(number not in held for number in lines) or any(each.given for each in script.directives):
            yield Job(file, script)


def _lines(heredoc: Heredoc) -> range:
    """The lines of a text that the script writes: the directives in it are another script's."""
    return range(heredoc.at.line, heredoc.at.line + heredoc.text.count("\n") + 1)


def srun_tasks(job: Job, srun: Arguments) -> int | None:
    """Tasks a node of one srun: by its own options, else by the script's directives."""
    own = srun.value("--ntasks-per-node", "--tasks-per-node")
    given = any(job.directive(each) for each in ("--ntasks", "--ntasks-per-node", "--tasks-per-node"))
    if own is not None and given and not srun.has("--ntasks", "-n", "--nodes", "-N"):
        total = job.number("--ntasks") or (job.nodes or 0) * (job.tasks_per_node or 0)
        if not total or not job.nodes or not own.isdecimal():
            return None
        # SLURM 22.05, run: "can't honor --ntasks-per-node set to 1 which doesn't match the requested tasks"
        return int(own) if int(own) * job.nodes == total else -(-total // job.nodes)
    if own is not None:
        return int(own) if own.isdecimal() else None
    tasks, nodes = srun.value("--ntasks", "-n"), srun.value("--nodes", "-N")
    if tasks is None and nodes is None:
        return job.tasks_per_node
    count = int(nodes) if nodes is not None and nodes.isdecimal() else job.nodes if nodes is None else None
    if tasks is None:
        return job.tasks_per_node
    return int(tasks) // count if tasks.isdecimal() and count and int(tasks) % count == 0 else None


def srun_nodes(job: Job, srun: Arguments) -> int | None:
    """Nodes of one srun."""
    own = srun.value("--nodes", "-N")
    return job.nodes if own is None else int(own) if own.isdecimal() else None


def steps(job: Job) -> Iterator[CommandLine]:
    """The commands of the script that start programs on ranks, but those over several kinds of node."""
    yield from (command for command in job.script.launches if not command.components)
