"""Launches on one host after the other."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Position
from dslaunch.files.script import Command, ShellScript, parse
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_LOOP = re.compile(r"^\s*(?:for|while|until)\b", re.MULTILINE)
_DONE = re.compile(r"(?:^|;)\s*done\b", re.MULTILINE)
_COUNTED = re.compile(r"--(?:node|machine)[-_]rank[ =][\"']?\\?\$")
"""A node's number that the loop counts."""
_LEFT_ALONE = re.compile(r"(?:.*[^&])?&|nohup|tmux|screen|setsid|-d")
"""Words with which a command doesn't wait for what it starts."""


@rule("launcher.one-by-one", severity="hang", raised_by="nobody", evidence="bash 5.2 and torchrun 2.13, run")
def one_by_one(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """One host's launcher after the other: the first waits for nodes that are never started."""
    for file, script in files.scripts():
        launches, lines = {command.at for command, _ in _started(script)}, file.places
        starts = [found.start() for found in _LOOP.finditer(file.text)]
        ends = [found.start() for found in _DONE.finditer(file.text)]
        for command in script.commands:
            if command.at not in launches or not _waits(command):
                continue
            if _in_loop(file.text, starts, ends, lines.offset(command.at)):
                message = "the loop waits here until this node's launcher ends, which waits for the next nodes."
                fix = "Put & behind the command, and wait behind the loop."
                yield Hit(file.name, command.at, message, fix)
        for command, later in _in_turn(script):
            message = (
                "the script waits here until this node's launcher ends, which waits for that of line "
                f"{later.at.line}."
            )
            yield Hit(file.name, command.at, message, "Put & behind the command, and wait behind the last.")


def _in_turn(script: ShellScript) -> Iterator[tuple[Command, CommandLine]]:
    """A command that waits for its launcher, and a later one of another node of the same run."""
    runs = [
        (each, command, meeting) for command, each in _started(script)
        if not command.conditional and (meeting := _meeting(each)) is not None
    ]  # fmt: skip
    for index, (launch, command, meeting) in enumerate(runs):
        others = (each for each in runs[index + 1 :] if each[2] == meeting and _differs(launch, each[0]))
        later = next(others, None)
        if later is None or not (_waits(command) or _is_here(command)):
            continue
        if "ssh" in (command.words[0].text, later[1].words[0].text):  # else they are notes for two machines
            yield command, later[0]


def _started(script: ShellScript) -> Iterator[tuple[Command, CommandLine]]:
    """What each command starts, itself or by what it hands to a shell on another host."""
    by_place = {launch.at: launch for launch in script.launches}
    for command in script.commands:
        if command.at in by_place:
            yield command, by_place[command.at]
        elif command.heredoc and command.words[0].text == "ssh":
            above = command.heredoc.at.line - 1
            for launch in parse(command.heredoc.text).launches[:1]:
                yield command, replace(launch, at=Position(launch.at.line + above, launch.at.column))


def _meeting(launch: CommandLine) -> tuple[str, ...] | None:
    """How many nodes meet and where, as typed; None of a run on one node, or where that isn't told."""
    launcher = launch.launcher("torchrun") or launch.launcher("accelerate")
    options = launcher.options if launcher else None
    nodes = options.value("--nnodes", "--num_machines", "--num-machines") if options else None
    if options is None or not nodes or not nodes.isdecimal() or int(nodes) < 2 or launch.launcher("srun"):
        return None
    where = [options.value(name, name.replace("_", "-")) or "" for name in _MEETING]
    return (nodes, *where) if any(where) else None


_MEETING = ("--rdzv_endpoint", "--rdzv_id", "--master_addr", "--master_port", "--main_process_ip")
_NUMBER = ("--node_rank", "--node-rank", "--machine_rank", "--machine-rank")


def _differs(one: CommandLine, other: CommandLine) -> bool:
    """Whether they are told to be two nodes."""
    numbers = [
        value for launch in (one, other) for launcher in launch.launchers
        if (value := launcher.options.value(*_NUMBER)) is not None
    ]  # fmt: skip
    return len(numbers) == 2 and numbers[0] != numbers[1] and all(each.isdecimal() for each in numbers)


def _is_here(command: Command) -> bool:
    """Whether the launcher runs on this host, in the foreground."""
    wrapped = command.words[0].text.rpartition("/")[2] in ("torchrun", "accelerate", "python", "python3")
    return wrapped and not command.background


def _waits(command: Command) -> bool:
    head = command.words[0].text
    left = command.background or any(_LEFT_ALONE.fullmatch(word.text) for word in command.words)
    return head in ("ssh", "docker", "kubectl") and not left and not (head == "ssh" and _has(command, "-f", "-n"))


def _has(command: Command, *options: str) -> bool:
    return any(word.text in options for word in command.words[1:4])


def _in_loop(text: str, starts: Sequence[int], ends: Sequence[int], start: int) -> bool:
    """Whether the command at `start` stands in a loop, and gives each pass another node's number."""
    opened, closed = bisect_left(starts, start), bisect_left(ends, start)
    if opened <= closed or closed == len(ends):
        return False
    return _COUNTED.search(text, start, ends[closed]) is not None
