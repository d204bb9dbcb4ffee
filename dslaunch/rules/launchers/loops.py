"""Launches in a loop over hosts."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Lines
from dslaunch.files.script import Command
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
    """A loop over hosts that waits for each node's launcher: the first waits for nodes that never start."""
    for file, script in files.scripts():
        launches, lines = {launch.at for launch in script.launches}, Lines(file.text)
        starts = [found.start() for found in _LOOP.finditer(file.text)]
        ends = [found.start() for found in _DONE.finditer(file.text)]
        for command in script.commands:
            if command.at not in launches or not _waits(command):
                continue
            if _in_loop(file.text, starts, ends, lines.offset(command.at)):
                message = "the loop waits here until this node's launcher ends, which waits for the next nodes."
                fix = "Put & behind the command, and wait behind the loop."
                yield Hit(file.name, command.at, message, fix)


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
