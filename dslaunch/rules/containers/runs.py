"""Containers that start training: network, GPUs, terminal, and files of variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments, Word, launcher_options
from dslaunch.files.position import Position
from dslaunch.files.script import Command
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.torchrun import most_nodes
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_DOCKER, _SINGULARITY = ("docker", "podman"), ("singularity", "apptainer")
_RUNS = ("run", "exec")
_SWITCHES_OF_DOCKER = """
    -d --detach -i --interactive -t --tty -it -ti -dit -itd -id -di -dt -td --rm --privileged --init --read-only
    -P --publish-all --oom-kill-disable --no-healthcheck --sig-proxy --disable-content-trust -q --quiet --no-hosts
    --replace --tls-verify --env-host --http-proxy --rmi --use-api-socket"""
_SWITCHES_OF_SINGULARITY = """
    --nv --nvccli --rocm --cleanenv -e --contain -c --containall -C --fakeroot -f --writable -w --writable-tmpfs
    --no-home --userns -u --pid -p --ipc -i --net -n --uts --allow-setuid --compat --disable-cache --keep-privs
    --no-eval --no-https --no-init --no-pid --no-privs --no-umask --passphrase --sharens --underlay --vm
    --no-nv --no-rocm --unsquash"""
_DOCKER_SWITCHES = frozenset(_SWITCHES_OF_DOCKER.split())
_SINGULARITY_SWITCHES = frozenset(_SWITCHES_OF_SINGULARITY.split())
_PROGRAM = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|python[\d.]*|(?:ba|z|da)?sh|env|mpirun|exec)")
"""What stands behind an image."""
_BY_ENVIRONMENT = re.compile(r"(?:SINGULARITY|APPTAINER)_(?:NV|NVCCLI|ROCM)\b")
_NVIDIA = re.compile(
    r"nvidia|nvcr\.io|cuda|\bngc\b|[:_-](?:v100|a100|h100|h200|b200|gh200|l40s?|rtx)\b|NCCL_IB_", re.IGNORECASE
)
"""What tells NVIDIA's GPUs: a library of theirs, an image, a type."""
_ISOLATED = ("bridge", "none", "default")
_INTERACTIVE = re.compile(r"-[a-z]*i[a-z]*|--interactive(?:=true)?")
_TTY = re.compile(r"-[a-z]*t[a-z]*|--tty(?:=true)?")
_DETACHED = re.compile(r"-[a-z]*d[a-z]*|--detach(?:=true)?")
_IN_TEXT = re.compile(r"\bdocker\s+(?:container\s+)?(?:run|exec)\s+([^\n]*)")
_CLI = "docker/cli:cli/command/container/run.go, opts/file.go 28.0, run"


@dataclass(frozen=True)
class Container:
    """One `docker run` or `singularity exec` of a script, with what it starts on ranks."""

    file: File
    command: Command
    program: str
    """docker | podman | singularity | apptainer"""
    options: Arguments
    at: Position
    launch: CommandLine | None
    entered: bool
    """`docker exec`: the container is there already."""
    inside: tuple[Word, ...]
    """What runs in it: the words behind the image; none where the image isn't told."""


def containers(files: FileSet) -> Iterator[Container]:
    """Every container that a script runs a command in."""
    for file, script in files.scripts():
        launches = {launch.at: launch for launch in script.launches}
        for command in script.commands:
            at = _start(command.words)
            if at is not None:
                program = _name(command.words[at])
                switches = _DOCKER_SWITCHES if program in _DOCKER else _SINGULARITY_SWITCHES
                options = _options(command.words[at + 2 :], switches)
                launch = launches.get(command.at)
                entered = program in _DOCKER and command.words[at + 1].text == "exec"
                _, rest = launcher_options(command.words[at + 2 :], switches)
                inside = tuple(rest[1:]) if rest and rest[0].known else ()
                yield Container(file, command, program, options, command.words[at].at, launch, entered, inside)


def _start(words: Sequence[Word]) -> int | None:
    known = (*_DOCKER, *_SINGULARITY)
    pairs = enumerate(pairwise(words))
    return next((at for at, (one, two) in pairs if _name(one) in known and two.text in _RUNS), None)


def _options(words: Sequence[Word], switches: frozenset[str]) -> Arguments:
    """The options before the image; not all of them where one word isn't told."""
    found, rest = launcher_options(words, switches)
    front = words[: len(words) - len(rest)]
    told = all(word.known or (at and front[at - 1].text.startswith("-")) for at, word in enumerate(front))
    image = bool(rest) and (rest[0].known or (len(rest) > 1 and _PROGRAM.fullmatch(rest[1].text) is not None))
    return Arguments(found.flags, complete=told and image)


def _name(word: Word) -> str:
    return word.text.rpartition("/")[2]


@rule(
    "container.network", severity="hang", raised_by="nobody",
    evidence="the manual page of docker run 28.0, --network; NVIDIA NCCL 2.27, Networking issues",
)  # fmt: skip
def network(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A launch over several nodes in a container on docker's own network, which the other nodes don't reach."""
    for each in containers(files):
        launcher = each.launch.launcher("torchrun") if each.launch else None
        nodes = most_nodes(launcher) if launcher else None
        given = each.options.value("--network", "--net")
        bridged = given in _ISOLATED or (given is None and each.options.complete)
        if each.program in _DOCKER and not each.entered and nodes is not None and nodes > 1 and bridged:
            message = (
                f"{nodes} nodes, and the container stands in a network of this host's alone: NCCL's ports, which "
                "are chosen by chance, aren't reached from the others."
            )
            yield Hit(each.file.name, each.at, message, "Add --network host (and --ipc host, or --shm-size).")


@rule(
    "container.gpus", severity="error", raised_by="torch",
    evidence="the manual pages of apptainer exec 1.3, --nv, and of docker run 28.0, --gpus",
)  # fmt: skip
def gpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A container that trains and is given no GPU."""
    for each in containers(files):
        if each.launch is None or not each.options.complete or each.file.holds(_BY_ENVIRONMENT):
            continue
        if each.launch.launcher("torchrun") is None and each.launch.launcher("deepspeed") is None:
            continue
        if each.inside and each.inside[0].text in ("--gpus", "--nv", "--rocm"):
            continue  # container.order
        where = "unless the host's configuration gives it to all containers"
        if each.program in _SINGULARITY and not each.options.has("--nv", "--nvccli", "--rocm"):
            message = f"{each.program} without --nv: on NVIDIA there is no GPU driver in the container, {where}."
            of_others: Severity = "info"  # AMD's GPUs are seen without
            severity = None if each.file.holds(_NVIDIA) else of_others
            fix = f"Write {each.program} exec --nv (--rocm on AMD)."
            yield Hit(each.file.name, each.at, message, fix, severity)
        elif each.program in _DOCKER and not each.options.has("--gpus", "--runtime", "--device", "--privileged"):
            message = f"{each.program} run without --gpus: no GPU in the container, {where}."
            found = Hit(each.file.name, each.at, message, "Add --gpus all.", severity="info")
            yield from () if each.entered else (found,)


@rule("container.terminal", severity="error", raised_by="nobody", evidence=_CLI)
def terminal(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """docker run -it where there is no terminal: it exits."""
    for file, script in files.scripts():
        batch = any(each.read for each in script.directives)
        for command in script.commands:
            head = _name(command.words[0])
            where = _without_terminal(command, batch=batch)
            words = tuple(word.text for word in command.words)
            at = _start(command.words)
            if not where:
                continue
            if at is not None and _name(command.words[at]) == "docker" and _asks(words[at + 2 :]):
                yield _no_terminal(file, command.words[at].at, where)
            elif head == "ssh":
                for word in command.words:
                    inside = _IN_TEXT.search(word.text)
                    if inside and _asks(inside[1].split()):
                        yield _no_terminal(file, word.at, where)


def _no_terminal(file: File, at: Position, where: str) -> Hit:
    message = f"docker run -it {where}: there is no terminal, and docker exits (the input device is not a TTY)."
    return Hit(file.name, at, message, "Take -it out, or -t at least.")


def _without_terminal(command: Command, *, batch: bool) -> str:
    """Why a command has no terminal; empty where it may have one."""
    texts = [word.text for word in command.words]
    head = _name(command.words[0])
    if head == "ssh":
        front = texts[: _start(command.words)]
        asked = any(re.fullmatch(r"-[A-Za-z]*t[A-Za-z]*", text) for text in front)
        return "" if asked else "through ssh without -t"
    if head == "srun":
        return "" if "--pty" in texts else "under srun"
    return "in a batch script" if batch else "under nohup" if head == "nohup" else ""


def _asks(words: Sequence[str]) -> bool:
    """Whether -i and -t are among the options in front, and no -d."""
    front: list[str] = []
    words = list(words)
    while words and words[0].startswith("-"):
        front.append(words[0])
        takes = words[0] not in _DOCKER_SWITCHES and "=" not in words[0]
        words = words[2 if takes else 1 :]
    short = [each for each in front if each in _DOCKER_SWITCHES or each.startswith("--")]
    interactive, tty, detached = (
        any(pattern.fullmatch(each) for each in short) for pattern in (_INTERACTIVE, _TTY, _DETACHED)
    )
    return interactive and tty and not detached


@rule("container.env-file", severity="wrong", raised_by="nobody", evidence=_CLI)
def env_file(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """docker's --env-file takes lines literally: quotes and $NAME stay, and export isn't known."""
    for each in containers(files):
        for flag in each.options.flags if each.program == "docker" else ():
            if flag.name != "--env-file" or not flag.values:
                continue
            name = flag.values[-1].rpartition("/")[2]
            for file in files.files:
                if name and file.name.rpartition("/")[2] == name:
                    yield from _literal(file)


def _literal(file: File) -> Iterator[Hit]:
    for number, line in enumerate(file.lines, 1):
        name, equals, value = line.lstrip().partition("=")
        at = Position(number, len(line) - len(line.lstrip()) + 1)
        if not equals or name.startswith("#"):
            continue
        if re.search(r"\s", name):
            message = f"{name!r} holds a blank, which docker's --env-file refuses: the container isn't started."
            yield Hit(file.name, at, message, f"Write {name.split()[-1]}={value.strip()}.", "error")
        elif len(value) > 1 and value[0] in "\"'" and value.rstrip()[-1] == value[0]:
            message = f"{name}={value}: docker's --env-file keeps the quotes as part of the value."
            yield Hit(file.name, at, message, "Take the quotes out.")
        elif re.search(r"\$\{?[A-Za-z_]", value):
            message = f"{name}={value}: docker's --env-file doesn't fill in the variable."
            yield Hit(file.name, at, message, f"Write the value, or give docker -e {name}.")
