"""The steps of a launch. A dry run prints this list, a run executes the same list."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WriteFiles:
    """Put the rendered files into the run folder."""

    folder: Path
    files: Mapping[str, str]
    work_dir: Path
    """Where the user stands; state.json keeps it for a resume."""
    source: Path | None = None
    """The reviewed folder that they are an exact copy of."""

    def describe(self) -> str:
        names = " ".join(shlex.quote(name) for name in sorted(self.files))
        if self.source is None:
            return f"write {shlex.quote(str(self.folder))}: {names}"
        return f"copy {shlex.quote(str(self.source))} to {shlex.quote(str(self.folder))}: {names}"


@dataclass(frozen=True)
class RecordCode:
    """Write down the revision and the uncommitted changes of the program's checkout."""

    folder: Path
    source: Path

    def describe(self) -> str:
        return f"record the code of {shlex.quote(str(self.source))}: code.json, code.diff"


@dataclass(frozen=True)
class Pack:
    """Make the archive of the code that is staged: RUN/stage.tar and what RUN/stage.txt says of it."""

    folder: Path
    source: Path
    work_dir: Path
    exclude: tuple[str, ...]
    """Patterns of what is left out."""

    def describe(self) -> str:
        left_out = " ".join(shlex.quote(each) for each in self.exclude)
        without = f", without {left_out}" if left_out else ""
        return f"pack {shlex.quote(str(self.source))} into {self.folder.name}/stage.tar{without}"


@dataclass(frozen=True)
class Stage:
    """Unpack the archive on every host before the ranks start there, and remove it after their end."""

    folder: Path
    to: str
    hosts: tuple[str, ...]
    script: str

    def describe(self) -> str:
        return f"unpack stage.tar in {shlex.quote(self.to)} on {len(self.hosts)} hosts; afterwards remove it there"


@dataclass(frozen=True)
class Execute:
    """Run a command here, supervised."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    """Variables added to the shell's own."""
    log: Path
    unset: tuple[str, ...] = ()
    """Variables of the shell that the command must not see."""
    free_port: str = ""
    """A variable that gets a free TCP port of this machine, chosen at the start; empty: none."""
    ranks: int | None = None
    """Ranks that record here how they ended; None where other hosts may keep their records."""

    def describe(self) -> str:
        port = [f"{self.free_port}=<a free port>"] if self.free_port else []
        words = [*(f"--unset={name}" for name in self.unset), *assignments(self.env), *port]
        command = shlex.join(self.argv)
        log = shlex.quote(str(self.log))
        return f"cd {shlex.quote(str(self.cwd))} && env {' '.join(words)} {command} 2>&1 | tee -a {log}"


@dataclass(frozen=True)
class Submit:
    """Hand a job to SLURM, from an environment that holds nothing but what is named here."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    passed: tuple[str, ...]
    """Variables of the shell that are handed over; their values are not shown."""
    fresh: bool = True
    """The run folder was made for this submission, and goes where SLURM refuses it."""
    continuations: int = 0
    """Jobs queued behind it, each of which starts where the one before it failed."""

    def behind(self, job: str) -> tuple[str, ...]:
        """The command that queues the same job behind `job`."""
        options = (f"--dependency=afternotok:{job}", "--kill-on-invalid-dep=yes")
        return (self.argv[0], *options, *self.argv[1:])

    def describe(self) -> str:
        words = [*(f'{name}="${name}"' for name in self.passed), *assignments(self.env)]
        line = f"cd {shlex.quote(str(self.cwd))} && env -i {' '.join(words)} {shlex.join(self.argv)}"
        if not self.continuations:
            return line
        behind = " ".join(self.behind("THE JOB BEFORE")[1:3])
        return f"{line}\n  and {self.continuations} more behind it, each with {behind}"


@dataclass(frozen=True)
class SubmitArray:
    """Hand runs that ask SLURM for the same to it as one array job; a task's number is its run's."""

    argv: tuple[str, ...]
    """sbatch, which reads the script from stdin."""
    script: str
    env: Mapping[str, str]
    passed: tuple[str, ...]
    """Variables of the shell that are handed over; their values are not shown."""
    runs: Mapping[int, Path]
    """Run folders by task."""
    alone: Mapping[int, Submit]
    """How each run is handed over by itself: its continuations are."""

    def describe(self) -> str:
        words = [*(f'{name}="${name}"' for name in self.passed), *assignments(self.env)]
        lines = [f"env -i {' '.join(words)} {shlex.join(self.argv)}"]
        lines += [f"  task {task} is {shlex.quote(str(folder))}" for task, folder in self.runs.items()]
        behind = {step.continuations for step in self.alone.values()} - {0}
        lines += [f"  and {number} jobs more behind each task" for number in sorted(behind)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Follow:
    """Show the submitted job's log and wait for its end; Ctrl-C leaves it running."""

    folder: Path

    def describe(self) -> str:
        return f"follow the job and {shlex.quote(str(self.folder / 'logs'))}/slurm-JOB.out"


@dataclass(frozen=True)
class Create:
    """Hand a manifest to Kubernetes."""

    argv: tuple[str, ...]
    cwd: Path
    text: str = ""
    """The manifest of a later attempt, on kubectl's standard input; empty: `argv` names the file."""
    first: tuple[str, ...] = ()
    """What takes the earlier attempt's objects away before that; empty: there is none."""

    @property
    def fresh(self) -> bool:
        """The run folder was made for it, and goes where Kubernetes refuses it."""
        return not self.first

    def describe(self) -> str:
        here = f"cd {shlex.quote(str(self.cwd))} && "
        if self.fresh:
            return here + shlex.join(self.argv)
        again = f"{here}{shlex.join(self.argv)}  # with DSLAUNCH_ATTEMPT in each pod"
        return f"{here}{shlex.join(self.first)}\n{again}"


Step = WriteFiles | RecordCode | Pack | Stage | Execute | Submit | Follow | Create


def assignments(env: Mapping[str, str]) -> list[str]:
    """NAME=value words, shell-quoted, by name."""
    return [f"{name}={shlex.quote(env[name])}" for name in sorted(env)]
