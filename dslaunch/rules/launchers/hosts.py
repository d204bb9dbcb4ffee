"""Command lines of DeepSpeed's launcher: which hosts and GPUs they mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.lexer import UnclosedError, tokens
from dslaunch.files.position import Position
from dslaunch.files.script import ShellScript
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.known import gpus_per_node
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_RUNNER = "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py 0.19.8, run"
INCLUDE, EXCLUDE = ("--include", "-i"), ("--exclude", "-e")
NODES, GPUS, HOSTFILE = ("--num_nodes",), ("--num_gpus", "--num_accelerators"), ("--hostfile", "-H")


@dataclass(frozen=True)
class Launch:
    """One command of the deepspeed launcher."""

    file: File
    command: CommandLine
    launcher: Launcher
    hosts: dict[str, int] | None
    """Slots by host, where the hostfile is among the files and can be read."""

    def value(self, names: tuple[str, ...]) -> str:
        """The option's value; empty where it isn't given or isn't told."""
        value = self.launcher.options.value(*names)
        return value if value is not None and is_told(value) else ""

    def count(self, names: tuple[str, ...]) -> int | None:
        """The option's value as a whole number, or None."""
        text = self.value(names)
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 7 else None

    def has(self, *names: str) -> bool:
        """Whether one of these options is given."""
        return self.launcher.options.has(*names)

    def hit(self, names: tuple[str, ...], message: str, fix: str, severity: Severity | None = None) -> Hit:
        """A hit at the option, or at the command where it isn't given."""
        at = self.launcher.options.position(*names) if self.has(*names) else self.launcher.at
        return Hit(self.file.name, at, message, fix, severity, "nobody" if severity else None)

    def at_argument(self, at: Position, message: str, fix: str) -> Hit:
        """A hit at one of the script's own arguments."""
        return Hit(self.file.name, at, message, fix)


def launches(files: FileSet) -> Iterator[Launch]:
    """Each command of the deepspeed launcher."""
    for file, command in files.launches():
        launcher = command.launcher("deepspeed")
        if launcher is not None and (command.script is not None or _swallowed(launcher)):
            yield Launch(file, command, launcher, _hosts(files, launcher))


def _swallowed(launcher: Launcher) -> bool:
    """Whether an option that the launcher doesn't have, or that has no value, stands before the script."""
    return any(value.endswith(".py") for flag in launcher.options.flags for value in flag.values)


def _hosts(files: FileSet, launcher: Launcher) -> dict[str, int] | None:
    wanted = (launcher.options.value(*HOSTFILE) or "").rpartition("/")[2]
    for file in files.of("hostfile"):
        if wanted and file.name.rpartition("/")[2] == wanted and all(line.host for line in file.value):
            return {line.host: line.slots for line in file.value}
    return None


@rule("launcher.filters", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def filters(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Filters that exclude each other."""
    for launch in launches(files):
        if launch.has(*INCLUDE) and launch.has(*EXCLUDE):
            yield launch.hit(EXCLUDE, "--include and --exclude together: ValueError.", "Keep one.")
        for names in (NODES, GPUS):
            count = launch.count(names)
            if launch.has(*INCLUDE, *EXCLUDE) and count is not None and count >= 0:
                message = f"{names[0]} together with --include or --exclude: ValueError."
                yield launch.hit(names, message, f"Delete {names[0]}, or the filter.")


@rule("launcher.filter-text", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def filter_text(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A filter that isn't HOST:SLOT,SLOT@HOST."""
    for launch in launches(files):
        for names in (INCLUDE, EXCLUDE):
            text = launch.value(names)
            if text and slots_of(text) is None:
                message = (
                    f"{text[:60]!r} isn't HOST:SLOT,SLOT@HOST: ValueError (no ranges, no commas "
                    "between hosts)."
                )
                yield launch.hit(
                    names, message, "Write each slot, and @ between hosts: worker-0:0,1@worker-1."
                )


def slots_of(text: str) -> dict[str, list[int]] | None:
    """Slots by host, empty for all of a host's; None where DeepSpeed can't read it."""
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        numbers = slots.split(",") if colon else []
        if not all(number.strip().isdecimal() for number in numbers) or (not colon and "," in host):
            return None
        found.setdefault(host, []).extend(int(number) for number in numbers)
    return found


@rule(
    "launcher.filter-host",
    severity="error",
    raised_by="deepspeed launcher",
    evidence=f"{_RUNNER}; DeepSpeed#3625",
)
def filter_host(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A filter that names a host or a slot which isn't there, or leaves none."""
    for launch in launches(files):
        for names in (INCLUDE, EXCLUDE):
            parsed = slots_of(launch.value(names)) if launch.value(names) else None
            if parsed and launch.hosts is not None:
                yield from _absent(launch, names, parsed, launch.hosts)
            others = [host for host in parsed or () if host not in ("localhost", "")]
            if others and not launch.has(*HOSTFILE):
                message = f"{others[0]} without --hostfile: ValueError, unless /job/hostfile has it."
                yield launch.hit(names, message, "Give --hostfile.", "wrong")


def _absent(
    launch: Launch, names: tuple[str, ...], parsed: dict[str, list[int]], hosts: dict[str, int]
) -> Iterator[Hit]:
    for host, slots in parsed.items():
        beyond = [slot for slot in slots if slot >= hosts.get(host, 0)]
        if host not in hosts:
            yield launch.hit(
                names, f"{host} isn't in the hostfile: ValueError.", f"Use one of {', '.join(hosts)}."
            )
            return
        if beyond:
            message = f"{host} has {hosts[host]} slots, and slot {beyond[0]} is none of them: ValueError."
            yield launch.hit(names, message, f"Use slots 0 to {hosts[host] - 1}.")
            return
    every = all(
        not parsed.get(host, [-1]) or set(parsed.get(host, [])) >= set(range(hosts[host])) for host in hosts
    )
    if names == EXCLUDE and every:
        yield launch.hit(names, "nothing is left to run on: IndexError.", "Keep a host.")


@rule("launcher.filter-order", severity="info", raised_by="nobody", evidence=_RUNNER)
def filter_order(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An --include in another order than the hostfile, whose first host has rank 0."""
    for launch in launches(files):
        wanted = [host for host in slots_of(launch.value(INCLUDE)) or {} if host in (launch.hosts or {})]
        ranked = [host for host in launch.hosts or {} if host in wanted]
        if wanted != ranked:
            message = f"ranks are given out in the hostfile's order: {ranked[0]} has rank 0, not {wanted[0]}."
            yield launch.hit(INCLUDE, message, f"Put {wanted[0]} first in the hostfile, or leave it so.")


@rule("launcher.counts", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def counts(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Numbers of nodes or GPUs that aren't there, or count as none given."""
    for launch in launches(files):
        nodes, gpus = launch.count(NODES), launch.count(GPUS)
        for names, count in ((NODES, nodes), (GPUS, gpus)):
            if count == 0:
                message = f"{names[0]} 0 counts as not given: all of them are used."
                yield launch.hit(names, message, "Write a number above 0.", "wrong")
        if nodes is not None and nodes > 1 and not launch.has(*HOSTFILE):
            message = f"--num_nodes {nodes} without --hostfile: ValueError, unless /job/hostfile is there."
            yield launch.hit(NODES, message, "Give --hostfile.", "wrong")
        if launch.hosts is not None and nodes is not None and nodes > len(launch.hosts):
            message = f"--num_nodes {nodes}, but the hostfile has {len(launch.hosts)}: all of those are used."
            yield launch.hit(NODES, message, f"Write {len(launch.hosts)}, or add hosts.", "wrong")
        least = min(launch.hosts.values()) if launch.hosts else None
        if gpus is not None and least is not None and gpus > least:
            message = (
                f"--num_gpus {gpus}, but a host has {least} slots: not checked, invalid device "
                "when it starts."
            )
            yield launch.hit(GPUS, message, f"Write {least} at most.", "error")


@rule(
    "launcher.visible-devices", severity="wrong", raised_by="nobody",
    evidence=f"{_RUNNER}; DeepSpeed#662, #2980; huggingface/accelerate#663",
)  # fmt: skip
def visible_devices(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """CUDA_VISIBLE_DEVICES, which the launcher replaces."""
    fix = "Say it to the launcher: --include localhost:0,1 (or HOST:0,1)."
    for launch in launches(files):
        for found in (*launch.command.environment, *_before(launch)):
            if found.name != "CUDA_VISIBLE_DEVICES" or not found.value or _is_of_subshell(launch, found):
                continue
            more = (launch.count(GPUS) or 0) > len(found.value.split(","))
            if _is_all(found.value) and not more and not _beyond(found.value, launch.file.value):
                break
            told = launch.has(*INCLUDE, *EXCLUDE, *GPUS) or (launch.count(NODES) or 0) > 1
            if launch.has(*HOSTFILE):
                message = (
                    "CUDA_VISIBLE_DEVICES with a hostfile isn't used: each node takes its slots from 0 on."
                )
                yield Hit(launch.file.name, found.at, message, fix)
            elif told:
                message = (
                    "CUDA_VISIBLE_DEVICES beside --num_gpus or a filter is deleted: devices count from 0."
                )
                yield Hit(launch.file.name, found.at, message, fix)
            elif beyond := _beyond(found.value, launch.file.value):
                message = f"device {beyond} of CUDA_VISIBLE_DEVICES isn't among the job's GPUs: ValueError."
                yield Hit(launch.file.name, found.at, message, "Count the job's devices from 0.", "error")
            elif found.value.startswith(("GPU-", "MIG-")):
                message = "the launcher reads CUDA_VISIBLE_DEVICES as numbers: ValueError for an identifier."
                yield Hit(launch.file.name, found.at, message, "Use numbers, or torchrun.", "error")
            break


def _is_all(devices: str) -> bool:
    """Whether the devices are those that count from 0 anyway: `0,1,2,3`."""
    named = devices.split(",")
    return len(named) > 1 and named == [str(number) for number in range(len(named))]


def _beyond(devices: str, script: ShellScript) -> str:
    """The first device that a job of SLURM doesn't have on a node; empty where that isn't known."""
    have = gpus_per_node(script)
    named = [each for each in devices.split(",") if each.isdecimal()]
    return next((each for each in named if have is not None and int(each) >= have), "")


def _before(launch: Launch) -> list[Assignment]:
    """Assignments above the command, the last one first."""
    return [found for found in reversed(launch.file.assignments) if found.at < launch.command.at]


def _is_of_subshell(launch: Launch, found: Assignment) -> bool:
    """Whether a `( ... )` around an assignment is closed before the command."""
    places, depth = launch.file.places, 0
    begin, end = places.offset(found.at), places.offset(launch.command.at)
    if ")" not in launch.file.text[begin:end] or end - begin > _FAR:
        return False
    try:
        for token in tokens(launch.file.text, begin, end):
            sign = launch.file.text[token.start : token.end] if token.kind == "operator" else ""
            depth += (sign == "(") - (sign == ")")
            if depth < 0:
                return True
    except UnclosedError:
        return False
    return False


_FAR = 20_000
"""Characters between an assignment and a command, beyond which a subshell isn't looked for."""
