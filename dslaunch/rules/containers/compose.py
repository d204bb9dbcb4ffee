"""What the services of a compose file run, read as scripts are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dslaunch.files import script
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word, is_told
from dslaunch.files.heredoc import Written
from dslaunch.files.position import Path, Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.torchrun import option
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.heredocs import Inner

_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_COMMAND_OPTION = re.compile(r"-\w*c")
_ONE_GPU = re.compile(r"\d+$|GPU-|MIG-")
"""What names one GPU; CDI's nvidia.com/gpu=all names all of them."""
_KEYS = ("command", "entrypoint")
_LOCAL = re.compile(r"addr(?:ess)?(?:[= ]|', ')(?:localhost|127\.)|endpoint(?:[= ]|', ')(?:localhost|127\.)")


def in_services(files: FileSet) -> Iterator[Inner]:
    """The command of each service; not of those that meet at localhost in the host's network, which they share."""
    for file, name, service in services(files):
        if service.get("network_mode") != "host" or not _LOCAL.search(str([service.get(key) for key in _KEYS])):
            yield from in_service(file, name, service)


def services(files: FileSet) -> Iterator[tuple[File, str, Mapping[str, Any]]]:
    """Every service, with its name."""
    for file in files.of("compose"):
        for name, service in file.value["services"].items():
            if isinstance(service, dict):
                yield file, name, service


def in_service(file: File, name: str, service: Mapping[str, Any]) -> Iterator[Inner]:
    """What one service runs."""
    for key in _KEYS:
        yield from _read(file, ("services", name, key), service)


@rule(
    "compose.gpus", severity="error", raised_by="torch",
    evidence="compose-spec/compose-spec:deploy.md, devices; torch 2.13 cuda.set_device",
)  # fmt: skip
def gpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A service that starts more processes than it has GPUs, or numbers them as the host does."""
    for file, name, service in services(files):
        has = devices(service)
        yield from _numbered(file, name, service, has) if has else ()
        for inner in in_service(file, name, service) if has is not None else ():
            for launch in inner.file.value.launches:
                torchrun = launch.launcher("torchrun")
                count = option(torchrun, "nproc-per-node") if torchrun else None
                if torchrun and has is not None and count is not None and count.isdecimal() and int(count) > has:
                    message = f"{count} processes, and service {name} is given {has} GPUs: invalid device ordinal."
                    at = inner.written.at(torchrun.options.position("--nproc-per-node", "--nproc_per_node"))
                    yield Hit(file.name, at, message, f"Give it {count} GPUs, or start {has} processes.")


def _numbered(file: File, name: str, service: Mapping[str, Any], has: int) -> Iterator[Hit]:
    """CUDA_VISIBLE_DEVICES with the host's numbers, where the service's own begin with 0."""
    for each in _assigned(file, ("services", name), service.get("environment")):
        numbers = each.value.split(",") if each.name == "CUDA_VISIBLE_DEVICES" else []
        beyond = [number for number in numbers if number.isdecimal() and int(number) >= has]
        if beyond and all(number.isdecimal() for number in numbers):
            message = (
                f"in the container its {has} GPUs are numbered from 0: CUDA_VISIBLE_DEVICES={each.value} names "
                f"none that is there, from {beyond[0]} on."
            )
            yield Hit(file.name, each.at, message, "Leave CUDA_VISIBLE_DEVICES out.")


def devices(service: Mapping[str, Any]) -> int | None:
    """GPUs that a service is given by number or by name; None where that is all, or not said."""
    value: Any = service
    for key in ("deploy", "resources", "reservations", "devices"):
        value = value.get(key) if isinstance(value, dict) else None
    found = [*value] if isinstance(value, list) else []
    found += [*service["gpus"]] if isinstance(service.get("gpus"), list) else []
    counts = [_count(each) for each in found if isinstance(each, dict)]
    return sum(each or 0 for each in counts) if counts and None not in counts else None


def _count(device: Mapping[str, Any]) -> int | None:
    named = device.get("device_ids")
    if isinstance(named, list):
        return len(named) if all(_ONE_GPU.match(str(each)) for each in named) else None
    count = device.get("count")
    return count if type(count) is int and count >= 0 else None


def _read(file: File, path: Path, service: Mapping[str, Any]) -> Iterator[Inner]:
    """The command as a script: one text, the words of a list, or what `sh -c` is given."""
    given = service.get(str(path[-1]))
    program = service.get("entrypoint")
    if path[-1] == "command" and isinstance(program, list) and isinstance(given, list):
        return  # what the program is given: read with it
    assigned = tuple(_assigned(file, path[:-1], service.get("environment")))
    if isinstance(given, str):
        text, place = given, path
    elif isinstance(given, list) and all(isinstance(each, str) for each in given) and given:
        text, place = given[-1], (*path, len(given) - 1)
        if not (_SHELL.fullmatch(given[0]) and len(given) > 2 and _COMMAND_OPTION.fullmatch(given[-2])):
            told = [(each.replace("$$", "$"), file.at(*path, index)) for index, each in enumerate(given)]
            told += _behind(file, path, service)
            words = tuple(Word(each, at, is_told(each)) for each, at in told)
            value = ShellScript(assigned, (), (Command(words, words[0].at, (), None, False),), {})
            here = Written(file.text, True, file.text, words[0].at, ())
            yield Inner(File(file.name, "shell", file.text, value, inside=True), here, file)
            return
    else:
        return
    written = _written(file, place, text.replace("$$", "$"))
    value = script.parse(written.text)
    value = replace(value, assignments=(*assigned, *value.assignments))
    yield Inner(File(file.name, "shell", written.text, value, problems=value.problems, inside=True), written, file)


def _behind(file: File, path: Path, service: Mapping[str, Any]) -> list[tuple[str, Position]]:
    """The words of `command` behind those of `entrypoint`."""
    more = service.get("command")
    if path[-1] != "entrypoint" or not isinstance(more, list):
        return []
    place = (*path[:-1], "command")
    return [(str(each).replace("$$", "$"), file.at(*place, index)) for index, each in enumerate(more)]


def _assigned(file: File, path: Path, environment: object) -> Iterator[Assignment]:
    """`environment`, which is a mapping or a list of NAME=value."""
    if isinstance(environment, dict):
        pairs = [(str(name), value, (*path, "environment", name)) for name, value in environment.items()]
    elif isinstance(environment, list):
        parts = [(str(each).partition("="), index) for index, each in enumerate(environment)]
        pairs = [(name, value, (*path, "environment", index)) for (name, _, value), index in parts]
    else:
        return
    for name, value, place in pairs:
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield Assignment(name, text, file.at(*place), is_told(text))


def _written(file: File, path: Path, text: str) -> Written:
    """The text behind as many line feeds as stand above it, with where each of its words stands."""
    at, source = file.at(*path), file.places
    above = "\n" * (at.line - 1)
    start = source.offset(at)
    moves: list[tuple[int, int]] = []
    for word in re.finditer(r"\S+", text):
        found = file.text.find(word[0], start)
        if found < 0:
            continue
        moves.append((len(above) + word.start(), found))
        start = found + len(word[0])
    rest = "\n" * (file.text.count("\n") - at.line + 1 - text.count("\n"))  # as many lines as the file has
    return Written(above + text + rest, True, file.text, Position(at.line, 1), tuple(moves))
