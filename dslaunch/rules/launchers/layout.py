"""Ranks against GPUs, and hostfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from dslaunch.files import hostfile
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import START, Position
from dslaunch.hosts import HOST_FIX, is_host
from dslaunch.planfile import Plan
from dslaunch.render.environment import is_reserved
from dslaunch.rules.launchers.hosts import HOSTFILE, launches
from dslaunch.rules.megatron.run import Run
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_EVIDENCE = "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py _parse_hostfile 0.19.8, run"
_GAP = re.compile(r"[xX]+(?:\.[xX]+)+|<.*>|(?:\w+_)?ip(?:_\w+)?\d*|your\w*", re.IGNORECASE)
"""What stands where an address is to be filled in."""
_SLOTS_GAP = re.compile(r"slots=[A-Za-z<]")
"""`slots=number_of_gpus`."""
_OTHERS_WORD = re.compile(r"\w+=\S+")
"""`type=gpu` of other launchers' hostfiles."""
_GRID = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


@rule("hostfile.empty", severity="error", raised_by="deepspeed launcher", evidence=_EVIDENCE)
def empty(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A hostfile without a host."""
    for file in _hostfiles(files):
        if not file.value:
            message = "the hostfile names no host; the deepspeed launcher raises ValueError."
            yield Hit(file.name, START, message, "Add a line `HOST slots=GPUS` for each node.")


@rule("hostfile.slots", severity="error", raised_by="deepspeed launcher", evidence=_EVIDENCE)
def slots(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A line that isn't `HOST slots=N`, no name of a host, or a host without slots."""
    for file in _hostfiles(files):
        for line in file.value:
            at = Position(line.line, 1)
            if not line.host:
                message = f"{line.text[:60]!r} isn't `HOST slots=N`; the deepspeed launcher raises ValueError."
                gap = _SLOTS_GAP.search(line.text) is not None
                severity: Severity | None = None if _is_for_deepspeed(file, files) and not gap else "info"
                yield Hit(file.name, at, message, "Write `HOST slots=GPUS`, with no spaces around =.", severity)
            elif not is_host(line.host):
                message = f"{line.host[:60]!r} is no host name; it would reach pdsh and ssh as it stands."
                yield Hit(file.name, at, message, f"{HOST_FIX}.", raised_by="nobody")
            elif line.slots == 0:
                message = f"{line.host} has slots=0: the launcher takes it and starts nothing there."
                fix = "Delete the line, or give the number of GPUs."
                yield Hit(file.name, at, message, fix, severity="wrong", raised_by="nobody")
            elif line.rest and not line.rest.startswith("#"):
                message = f"{line.rest[:60]!r} after slots={line.slots} is ignored by the deepspeed launcher."
                fix = "Write one number of slots, and nothing after it."
                others = _OTHERS_WORD.fullmatch(line.rest) and not _starts_deepspeed(files)
                yield Hit(file.name, at, message, fix, "info" if others else "wrong", "nobody")


def _hostfiles(files: FileSet) -> Iterator[File]:
    """The hostfiles, and what a command of the deepspeed launcher is given for one, whatever stands in it."""
    yield from files.of("hostfile")
    named = {launch.value(HOSTFILE).rpartition("/")[2] for launch in launches(files)} - {""}
    for file in files.files:
        if file.kind == "other" and file.name.rpartition("/")[2] in named:
            yield replace(file, kind="hostfile", value=hostfile.parse(file.text))


def _is_for_deepspeed(file: File, files: FileSet) -> bool:
    """Whether DeepSpeed's launcher is to read it: a name alone on each line is what others read."""
    names_alone = all(len(line.text.split()) == 1 for line in file.value)
    return not names_alone or _starts_deepspeed(files)


def _starts_deepspeed(files: FileSet) -> bool:
    return any(command.launcher("deepspeed") for _, command in files.launches())


@rule("hostfile.duplicate", severity="error", raised_by="deepspeed launcher", evidence=_EVIDENCE)
def duplicate(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A host that stands twice."""
    for file in files.of("hostfile"):
        first: dict[str, int] = {}
        for line in file.value:
            if line.host in first:
                message = f"{line.host} stands in line {first[line.host]} already; the launcher raises ValueError."
                fix = "Keep one line for the host, with all its slots."
                gap: Severity | None = "info" if _GAP.fullmatch(line.host) else None
                yield Hit(file.name, Position(line.line, 1), message, fix, gap)
            elif line.host:
                first[line.host] = line.line


@rule(
    "layout.ranks",
    severity="error",
    raised_by="nobody",
    evidence="NVIDIA/Megatron-LM:megatron/core/parallel_state.py initialize_model_parallel 0.16.1; arithmetic",
)
def ranks(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """More ranks than GPUs, or a grid that doesn't tile the ranks."""
    world = plan.world_size if plan else settings.world_size
    if plan is not None:
        yield from _planned(plan)
    if world is not None:
        for file in files.of("hostfile"):
            yield from _hosts(file, world)
        by_hand = world == 1 and settings.size_from.startswith("from ")  # one process: a tool for checkpoints
        for file, arguments in files.megatron() if not by_hand else ():
            yield from _grid(Run(file, arguments, settings), world)


@rule(
    "env.reserved",
    severity="error",
    raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/launcher/launch.py main 0.19.8; dslaunch's own rank.sh",
)
def reserved(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A run folder's environment sets what the launcher sets for each rank."""
    for file in files.of("env", "deepspeed_env") if plan else ():
        for assignment in file.assignments:
            if is_reserved(assignment.name):
                message = f"{assignment.name} is the launcher's to set, and would be the same on all ranks."
                yield Hit(file.name, assignment.at, message, "Delete the line; launcher.* and cluster decide it.")


def _planned(plan: Plan) -> Iterator[Hit]:
    gpus = plan.cluster.nodes * plan.cluster.gpus_per_node
    if plan.world_size > gpus:
        message = f"{plan.world_size} ranks on {plan.cluster.nodes} * {plan.cluster.gpus_per_node} = {gpus} GPUs."
        yield Hit("cluster", None, message, "Use more GPUs, or a smaller layout.")
    for name, part in plan.components.items():
        last = part.rank_offset + part.ranks
        if last > plan.world_size:
            message = f"{name} ends at rank {last - 1}, but there are {plan.world_size} ranks."
            yield Hit(f"strategy.{name}", None, message, "Lower tp, pp, cp or dp, or the rank offset.")


def _hosts(file: File, world: int) -> Iterator[Hit]:
    if not file.value or not all(line.host for line in file.value):
        return
    total = sum(line.slots for line in file.value)
    if total < world:
        message = f"the hostfile has {total} slots for {world} ranks."
        yield Hit(file.name, START, message, f"Add hosts until there are {world} slots, or plan for {total} GPUs.")


def _grid(run: Run, world: int) -> Iterator[Hit]:
    file, arguments = run.file, run.arguments
    sizes = {name: arguments.value(name) or "1" for name in _GRID}
    if not all(size.isdecimal() and len(size) < 7 and int(size) for size in sizes.values()):
        return
    product = prod(int(size) for size in sizes.values())
    if product and world % product:
        name = next(name for name in _GRID if sizes[name] != "1")
        tp, pp = (int(sizes[name]) for name in _GRID[:2])
        if run.is_deepspeed and tp * pp > world and world % tp == 0:
            message = f"tp {tp} on {world} ranks: Megatron-DeepSpeed takes pp {world // tp}, not {pp}, silently."
            fix = f"Write {_GRID[1]} {world // tp}, or start more ranks."
            yield Hit(file.name, arguments.position(_GRID[1]), message, fix, "wrong")
            return
        grid = f"tp * pp * cp = {' * '.join(sizes.values())} = {product}"
        message = f"{grid} doesn't divide {world} ranks; Megatron raises RuntimeError."
        yield Hit(file.name, arguments.position(name), message, f"Choose sizes whose product divides {world}.")
