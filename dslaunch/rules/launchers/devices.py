"""CUDA_VISIBLE_DEVICES against the processes of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Position
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.environment import settings_of
from dslaunch.rules.launchers.torchrun import option, torchruns
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings


@rule(
    "env.visible-devices",
    severity="error",
    raised_by="torch",
    evidence="CUDA C++ guide, CUDA_VISIBLE_DEVICES; torch 2.13",
)
def visible_devices(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More processes on a node than CUDA_VISIBLE_DEVICES shows, or a device named twice."""
    shown: dict[str, list[Assignment]] = {}
    elsewhere: dict[str, set[Position]] = {}
    for file, each in settings_of(files):
        if each.name == "CUDA_VISIBLE_DEVICES" and _NO_LIST.fullmatch(each.value):
            seen = _seen(each.value)
            what = f"CUDA shows GPU {','.join(seen)} alone" if seen else "CUDA shows no GPU"
            message = f"CUDA_VISIBLE_DEVICES={each.value} is no list of numbers: {what}."
            yield Hit(file.name, each.at, message, "Write each number, with commas between them: 0,1,2,3.")
        if each.name != "CUDA_VISIBLE_DEVICES" or not re.fullmatch(r"\d+(,\d+)*", each.value):
            continue
        shown.setdefault(file.name, []).append(each)
        devices = each.value.split(",")
        if len(set(devices)) < len(devices):
            message = f"CUDA_VISIBLE_DEVICES={each.value} names a device twice: CUDA then shows none."
            yield Hit(file.name, each.at, message, "Name each device once.")
    for file, command, launcher in torchruns(files):
        number = option(launcher, "nproc-per-node") or ""
        mine = {each.at for each in command.environment}
        if file.name not in elsewhere:
            elsewhere[file.name] = _in_front(file)
        others = elsewhere[file.name]
        before = [
            each for each in shown.get(file.name, ())
            if each.at < launcher.at and (each.at in mine or each.at not in others)
        ]  # fmt: skip
        count, has = int(number) if number.isdecimal() else 0, before[-1].value.count(",") + 1 if before else 0
        if before and count > has:
            gpus = "1 GPU" if has == 1 else f"{has} GPUs"
            message = f"{count} processes a node, and CUDA_VISIBLE_DEVICES={before[-1].value} shows {gpus}."
            fix = f"Show {count} GPUs, or start {has} process{'es' if has > 1 else ''}."
            yield Hit(file.name, before[-1].at, message, fix)


_NO_LIST = re.compile(
    r"\d+\s*[-:]\s*\d+|\d+(?:\s+\d+)+|\d+(?:;\d+)+|[\[({]\s*\d+.*[\])}]|(?:gpu|cuda:?)\s*\d+(?:,.*)?|all",
    re.IGNORECASE,
)
"""Lists as other programs write them: `0-7`, `[0,1]`, `0 1`, `cuda:0`, `all`."""


def _seen(value: str) -> list[str]:
    """The devices that CUDA reads: up to the first that begins with no digit, each as far as it has digits."""
    numbers = [re.match(r"\d*", part.strip()) for part in value.split(",")]
    return list(takewhile(bool, (found[0] for found in numbers if found)))


def _in_front(file: File) -> set[Position]:
    """Assignments that stand in front of commands, and hold for these alone."""
    commands = file.value.commands if file.kind == "shell" else ()
    return {each.at for command in commands for each in command.environment}
