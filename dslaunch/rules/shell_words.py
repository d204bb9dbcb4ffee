"""What a shell makes of a script's words: commands that end early, arrays, assignments, and jobs left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_BASH = "the manual page of bash 5.2, run"
_OPTION = re.compile(r"--[A-Za-z][\w-]*(?:=.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BLANK_END = re.compile(r"(?<!\\)\\[ \t]+$")
_ZSH = re.compile(r"#!.*\bzsh\b")


def _launching(files: FileSet) -> Iterator[tuple[File, ShellScript]]:
    """Scripts that start programs on ranks."""
    return ((file, script) for file, script in files.scripts() if script.launches)


@rule("shell.cut-command", severity="wrong", raised_by="nobody", evidence=_BASH)
def cut(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option where a command begins: the one before it ended without a backslash, or at a comment."""
    for file, script in _launching(files):
        lines = file.text.splitlines()
        for before, command in pairwise(script.commands):
            word = command.words[0]
            line = lines[command.at.line - 2] if command.at.line > 1 else ""
            if not _OPTION.fullmatch(word.text) or command.at.line <= before.at.line:
                continue
            if _BLANK_END.search(line):
                continue  # launcher.line-end says it
            name = word.text.partition("=")[0]
            why = "a comment ends a command" if "#" in line else "the line before ends without a backslash"
            message = f"{why}: {before.words[0].text} runs without {name}, which is then run by itself."
            fix = (
                "Take the comment out of the command."
                if "#" in line
                else "End the line before with a backslash."
            )
            yield Hit(file.name, command.at, message, fix)


@rule("shell.array", severity="wrong", raised_by="nobody", evidence=_BASH)
def array(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An array without [@]: only its first word reaches the command."""
    for file, script in _launching(files):
        for name, at in () if _ZSH.match(file.text) else script.first_words:
            message = f"${{{name}}} is the first word of the array alone; the others aren't handed on."
            yield Hit(file.name, at, message, f'Write "${{{name}[@]}}".')


@rule("shell.assignment", severity="wrong", raised_by="nobody", evidence=_BASH)
def assignment(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A blank beside the = of an assignment: the name is run as a command, and the variable stays empty."""
    for file, script in _launching(files):
        lines = file.text.splitlines()
        for command in script.commands:
            words = [word.text for word in command.words]
            counts = "((" in lines[command.at.line - 1][: command.at.column]  # for (( i = 0; ...
            if len(words) > 1 and words[1] == "=" and _NAME.fullmatch(words[0]) and not counts:
                message = f"`{words[0]} =` runs a command named {words[0]}: the variable isn't set."
                yield Hit(file.name, command.at, message, f"Write {words[0]}=VALUE without blanks.")


@rule("slurm.no-wait", severity="wrong", raised_by="nobody", evidence="SLURM 22.05, run")
def no_wait(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun in the background and no wait behind it: the job ends with the script, and its steps are killed."""
    for file, script in files.scripts():
        if not script.directives:
            continue
        lasting = [each.at for each in script.commands if _lasts(each)]
        for command in script.commands:
            if _left_behind(command) and not (lasting and lasting[-1] > command.at):
                message = (
                    "srun runs in the background, and nothing waits for it: the job ends, and srun is killed."
                )
                yield Hit(file.name, command.at, message, "Add `wait` as the last line.")


def _left_behind(command: Command) -> bool:
    return command.background and command.words[0].text == "srun" and not command.conditional


def _lasts(command: Command) -> bool:
    """Whether a command may last as long as a step: `wait`, another launch in front, or what a loop does."""
    name = command.words[0].text
    return command.conditional or name in ("wait", "fg") or (name in _LASTING and not command.background)


_LASTING = frozenset(
    {"srun", "torchrun", "deepspeed", "python", "python3", "bash", "sh", "sleep", "tail", "mpirun"}
)


@rule(
    "launcher.shared-port",
    severity="error",
    raised_by="torch",
    evidence="deepspeed 0.19.8 and torch 2.13, run",
)
def shared_port(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Two launches at a time on one node with one port."""
    for file, script in files.scripts():
        ports: dict[str, int] = {}
        backgrounds = {
            command.at: command.background for command in script.commands if not command.conditional
        }
        for at, name, port in _events(script):
            if name == "wait":
                ports.clear()
            elif port in ports:
                message = (
                    f"line {ports[port]} already runs with port {port} on this node: address already in use."
                )
                yield Hit(file.name, at, message, "Give each its own --master_port.")
            elif backgrounds.get(at):
                ports[port] = at.line


def _events(script: ShellScript) -> Iterator[tuple[Position, str, str]]:
    """(place, program, port) of what starts ranks on this node alone, and of each `wait`, in order."""
    found = [(each.at, "wait", "") for each in script.commands if each.words[0].text == "wait"]
    for command in script.launches:
        if not command.conditional and (port := _port(command)):
            found.append((command.at, command.launchers[0].program, port))
    return iter(sorted(found))


def _port(command: CommandLine) -> str:
    """Where the ranks of this node meet; empty where another node, or nobody, tells it."""
    launcher = command.launchers[0]
    options = launcher.options
    if launcher.program not in ("deepspeed", "torchrun") or not options.complete:
        return ""
    if options.has("--hostfile", "-H", "--standalone", "--rdzv-backend", "--rdzv_backend"):
        return ""
    if options.value("--nnodes") not in (None, "1"):
        return ""
    given = options.value("--master-port", "--master_port")
    return given or (_DEEPSPEED_PORT if launcher.program == "deepspeed" else "")


_DEEPSPEED_PORT = "29500"
"""deepspeed/constants.py TORCH_DISTRIBUTED_DEFAULT_PORT; torchrun takes a free port on one node."""
