"""The code on the nodes' own disks: an archive of launcher.stage.from that every host unpacks before ranks start.

RUN/stage.tar is made once, at the launch; a resume starts from the same. RUN/stage.txt has its SHA-256, its size
in bytes, and the place of the working folder inside of it, a line each. Over ssh every host gets the archive on a
connection of its own; under SLURM job.sbatch hands it on with sbcast, from node to node.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch.hosts import hosts_of
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Pack, Stage
from dslaunch.remote import Answer, on_all, over_ssh
from dslaunch.run.folder import write_file

ARCHIVE = "stage.tar"
ABOUT = "stage.txt"
SCRIPT = "stage.sh"
_CONNECT_S = 20.0
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Staged:
    """What RUN/stage.txt holds."""

    sha256: str
    bytes: int
    inside: str
    """The working folder, from the archive's root; `.` where it is the root."""

    @classmethod
    def read(cls, run_dir: Path) -> Staged:
        sha256, size, inside = (run_dir / ABOUT).read_text(encoding="utf-8").splitlines()
        return cls(sha256, int(size), inside)


def pack_step(request: LaunchRequest) -> Pack | None:
    """The archive to make; None where nothing is staged."""
    launcher = request.plan.launcher
    if not launcher.stage_to:
        return None
    return Pack(request.run_dir, request.absolute(launcher.stage_from), request.work_dir, launcher.stage_exclude)


def stage_step(request: LaunchRequest) -> Stage | None:
    """What is done on the hosts of a launch over ssh, the spare ones too; None where nothing is staged."""
    if not request.plan.launcher.stage_to:
        return None
    hosts = (*hosts_of(request), *request.plan.supervision.spares)
    return Stage(request.run_dir, staged_folder(request), hosts, request.files[SCRIPT])


def staged_folder(request: LaunchRequest) -> str:
    """Where this run's code stands on every host."""
    return f"{request.plan.launcher.stage_to.rstrip('/')}/{request.run_dir.name}"


def work_folder(request: LaunchRequest) -> str:
    """Where the ranks work: the user's folder, in the copy."""
    return os.path.normpath(f"{staged_folder(request)}/{_inside(request)}")


def check_stage(request: LaunchRequest, launcher: str) -> None:
    """Raises ConfigError where the code cannot be staged, or would not hold the program."""
    plan = request.plan
    if not plan.launcher.stage_to:
        return
    if launcher not in ("ssh", "slurm", ""):
        raise ConfigError(
            f"launcher.stage: belongs to launchers ssh and slurm; this is {launcher}. Take it out, or launch there"
        )
    source = request.absolute(plan.launcher.stage_from)
    if not source.is_dir():
        raise ConfigError(f"launcher.stage.from: {source} is no folder. Name the one that the code stands in")
    script = plan.program.script
    if not request.work_dir.is_relative_to(source):
        raise ConfigError(
            f"launcher.stage.from: {source} does not hold the folder that you launch from, {request.work_dir}. "
            "Launch from inside of it, or stage that folder"
        )
    if script and (Path(script).is_absolute() or not request.absolute(script).is_relative_to(source)):
        raise ConfigError(
            f"launcher.stage.from: the script {script} would not be run from the copy of {source}. Name it from "
            "the folder that you launch from, inside of that one"
        )


def pack(step: Pack, echo: Callable[[str], None]) -> None:
    """Make the archive and stage.txt; a launch again from the same run folder keeps what is there.

    Raises:
        ConfigError: a file cannot be read, or has a line end in its name.
    """
    archive = step.folder / ARCHIVE
    if (step.folder / ABOUT).exists():
        return
    count = 0
    try:
        with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in _kept(step.source, step.exclude, {step.folder, step.folder.parent}):
                tar.add(path, arcname=f"./{path.relative_to(step.source)}", recursive=False)
                count += 1
    except OSError as error:
        raise ConfigError(
            f"launcher.stage.from: {error}. Mend it, or leave it out: launcher.stage.exclude"
        ) from error
    digest = hashlib.sha256()
    with archive.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    size, inside = archive.stat().st_size, os.path.relpath(step.work_dir, step.source)
    write_file(step.folder / ABOUT, f"{digest.hexdigest()}\n{size}\n{inside}\n")
    found = f"{count} files and folders, {size / 2**20:.1f} MiB, SHA-256 {digest.hexdigest()[:12]}"
    echo(f"packed {step.source}: {found}")


def stage(step: Stage, echo: Callable[[str], None]) -> None:
    """Put the archive on every host, check it there and unpack it.

    Raises:
        LaunchError: one host or more has no room, cannot be reached, or has another archive; the others' copies
            are gone.
    """
    about = Staged.read(step.folder)
    room = _words(step, "room", step.to, str(about.bytes))
    answers = _everywhere(step, room)
    if not _failed(answers):
        copy = ("bash", "-c", 'cat >"$0/.staged.tar" && exec bash -c "$1" stage.sh put "$0" "$2"', step.to)
        answers = _everywhere(step, (*copy, step.script, about.sha256), step.folder / ARCHIVE)
    if failed := _failed(answers):
        unstage(step, lambda _: None)
        said = "\n".join(f"{each.host}: {each.why}" for each in failed)
        raise LaunchError(f"no rank was started:\n{said}", status=2)
    echo(f"the code stands in {step.to} on {len(step.hosts)} hosts")


def unstage(step: Stage, echo: Callable[[str], None]) -> None:
    """Remove from every host what was staged."""
    for answer in _everywhere(step, _words(step, "take", step.to)).values():
        if answer.status or answer.err.strip():
            echo(f"{answer.host}: {answer.why}")


def _words(step: Stage, *words: str) -> tuple[str, ...]:
    return ("bash", "-c", step.script, "stage.sh", *words)


def _everywhere(step: Stage, words: Sequence[str], source: Path = Path(os.devnull)) -> dict[str, Answer]:
    return on_all({host: over_ssh(host, words, _CONNECT_S) for host in step.hosts}, source, _LIMIT_S)


def _failed(answers: dict[str, Answer]) -> list[Answer]:
    return [each for each in answers.values() if each.status != 0]


def _inside(request: LaunchRequest) -> str:
    return os.path.relpath(request.work_dir, request.absolute(request.plan.launcher.stage_from))


def _kept(source: Path, exclude: Sequence[str], own: Collection[Path]) -> Iterator[Path]:
    """Everything below `source`, sorted, without what a pattern leaves out: a name, or a path from `source`.

    Args:
        own: folders that are left out in any case: the run's, which the archive grows in, and that of all runs.
    """
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        inside = [name for name in folders if here / name not in own]
        folders[:] = sorted(name for name in inside if not _left_out(here / name, source, exclude))
        for name in sorted({*files, *folders}):
            path = here / name
            if "\n" in str(path):
                raise ConfigError(f"launcher.stage.from: {str(path)!r} has a line end in its name. Rename it")
            if not _left_out(path, source, exclude):
                yield path


def _left_out(path: Path, source: Path, exclude: Sequence[str]) -> bool:
    inside = PurePosixPath(path.relative_to(source))
    return any(fnmatch.fnmatch(inside.name, each) or fnmatch.fnmatch(str(inside), each) for each in exclude)
