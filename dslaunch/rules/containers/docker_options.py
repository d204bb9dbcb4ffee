"""Options of `docker run` that part of the GPUs is asked for by, and those that stand behind the image."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import Flag, is_told
from dslaunch.planfile import Plan
from dslaunch.rules.containers.runs import Container, containers
from dslaunch.rules.launchers.torchrun import most_nodes, option
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_GPUS = "docker/cli:opts/gpus.go 28.0, run; NVIDIA container toolkit 1.17, documentation"
_ORDER = "docker/cli:cli/command/container/run.go (SetInterspersed) 28.0, run; apptainer 1.3, exec"
_OF_DOCKER = frozenset({
    "--cap-add", "--device", "--env", "--gpus", "--ipc", "--mount", "--net", "--network", "--privileged", "--rm",
    "--runtime", "--shm-size", "--ulimit", "--volume", "-e", "-v",
})  # fmt: skip
_OF_SINGULARITY = frozenset({"--bind", "--cleanenv", "--env", "--nv", "--pwd", "--rocm", "-B"})
_PROGRAM = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|python[\d.]*|(?:ba|z|da)?sh|mpirun)")
_SIZES = "the manual page of docker run 28.0, --shm-size, --memory"
_LEAST = 1 << 20
"""Bytes below which no training is meant."""
_NAME = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
_LATER = frozenset({"bash", "clush", "eval", "parallel-ssh", "pdsh", "sh", "ssh", "zsh"})
"""Programs whose text another shell reads."""
_FILLED = frozenset({"--gpus", "--mount", "--name", "--volume", "--workdir", "-e", "--env", "-v", "-w"})
_LOOPBACK = re.compile(r"MASTER_ADDR=(?:localhost|127\.0\.0\.1)")
_VISIBLE = re.compile(r"CUDA_VISIBLE_DEVICES=(\d+(?:,\d+)*)")


@rule(
    "container.address", severity="hang", raised_by="nobody",
    evidence="the manual page of docker run 28.0, --env; torchrun 2.13, run",
)  # fmt: skip
def address(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """MASTER_ADDR=127.0.0.1 for a container that is one node of several: each node meets itself."""
    for each in containers(files):
        yield from _loopback(each)


@rule("container.gpu-list", severity="error", raised_by="nobody", evidence=_GPUS)
def gpu_list(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A part of the GPUs that docker reads otherwise, that is too small, or numbered otherwise inside."""
    for each in containers(files):
        flags = [flag for flag in each.options.flags if flag.name == "--gpus" and flag.values]
        if each.program not in ("docker", "podman") or each.entered or not flags:
            continue
        flag = flags[-1]
        text = flag.values[-1]
        if not is_told(text) or not text:
            continue
        if text.startswith("device=") and "," in text:
            message = f"docker reads --gpus {text} as one GPU and a number of GPUs, and refuses both together."
            fix = f"""Keep quotes for docker itself: --gpus '"{text}"'."""
            yield Hit(each.file.name, flag.at, message, fix)
            continue
        has = _count(text)
        if has is not None:
            yield from _too_few(each, flag, has)


def _count(text: str) -> int | None:
    """How many GPUs `--gpus` hands over; None where that is all, or not told."""
    plain = text.strip('"')
    if plain.isdecimal():
        return int(plain)
    named = re.fullmatch(r'device=([\w-]+(?:,[\w-]+)*)', plain)
    return len(named[1].split(",")) if named else None


def _too_few(each: Container, flag: Flag, has: int) -> Iterator[Hit]:
    torchrun = each.launch.launcher("torchrun") if each.launch else None
    count = option(torchrun, "nproc-per-node") if torchrun else None
    if torchrun and count and count.isdecimal() and int(count) > has:
        message = f"{count} processes, and the container is given {has} GPUs: invalid device ordinal."
        at = torchrun.options.position("--nproc-per-node", "--nproc_per_node")
        fix = f"Give it {count} GPUs, or start {has} processes."
        yield Hit(each.file.name, at, message, fix, raised_by="torch")
    for name in each.options.flags:
        found = _VISIBLE.fullmatch(name.values[-1]) if name.name in ("-e", "--env") and name.values else None
        beyond = [number for number in found[1].split(",") if int(number) >= has] if found else []
        if found and beyond:
            message = (
                f"in the container its {has} GPUs are numbered from 0: {found[0]} names none that is there, from "
                f"{beyond[0]} on."
            )
            yield Hit(each.file.name, name.at, message, "Leave CUDA_VISIBLE_DEVICES out.", raised_by="torch")


def _loopback(each: Container) -> Iterator[Hit]:
    """MASTER_ADDR of the host itself, handed to a container that is one node of several."""
    torchrun = each.launch.launcher("torchrun") if each.launch else None
    nodes = most_nodes(torchrun) if torchrun else None
    address = torchrun.options.value("--master-addr", "--master_addr") if torchrun else None
    for flag in each.options.flags if nodes is not None and nodes > 1 and "MASTER_ADDR" in (address or "") else ():
        if flag.name in ("-e", "--env") and flag.values and _LOOPBACK.fullmatch(flag.values[-1]):
            message = f"{flag.values[-1]} on each of {nodes} nodes: each meets itself."
            yield Hit(each.file.name, flag.at, message, "Hand over the first node's address.", "hang")


@rule(
    "container.quoted-variable", severity="error", raised_by="nobody",
    evidence="the manual page of bash 5.2, Single Quotes; docker 28.0, run",
)  # fmt: skip
def quoted(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable in single quotes in an option of docker's: docker gets its name, and no shell fills it in."""
    for each in containers(files):
        words = each.command.words
        names = [word.text.rpartition("/")[2] for word in words]
        direct = names[: names.index(each.program)] if each.program in names else names
        if each.program not in ("docker", "podman") or each.entered or _LATER.intersection(direct):
            continue
        literal = {word.text for word in words if word.known and _NAME.search(word.text)}
        for flag in each.options.flags:
            text = flag.values[-1] if flag.values else ""
            if flag.name in _FILLED and text in literal:
                found = _NAME.search(text)
                name = found[0] if found else text
                message = f"in single quotes no shell fills in {name}: docker gets {text} as it stands."
                yield Hit(each.file.name, flag.at, message, "Write double quotes.")


@rule("container.shm-size", severity="memory", raised_by="torch", evidence=_SIZES)
def shm_size(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A size without a unit, which docker counts in bytes."""
    for each in containers(files):
        for flag in each.options.flags if each.program in ("docker", "podman") and not each.entered else ():
            text = flag.values[-1] if flag.values else ""
            if flag.name in ("--shm-size", "--memory", "-m") and text.isdecimal() and 0 < int(text) < _LEAST:
                message = f"{flag.name} {text} is {text} bytes: a unit is missing."
                yield Hit(each.file.name, flag.at, message, f"Write {text}g.")


@rule("container.order", severity="error", raised_by="nobody", evidence=_ORDER)
def order(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option of docker's or apptainer's behind the image: it is the command that the container runs."""
    for each in containers(files):
        known = _OF_DOCKER if each.program in ("docker", "podman") else _OF_SINGULARITY
        first = each.inside[0] if each.inside and not each.entered else None
        if first is None or first.text.partition("=")[0] not in known:
            continue
        if any(_PROGRAM.fullmatch(word.text) for word in each.inside[1:4]):
            message = f"{first.text} behind the image isn't {each.program}'s: it is the command that is run."
            yield Hit(each.file.name, first.at, message, "Move it before the image.")
