"""Megatron's arguments: megatron_args.txt (one flag with its values on each line), or the words of a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from dslaunch.files.commands import CommandLine
from dslaunch.files.flags import Arguments, Flag
from dslaunch.files.position import Position, Problem, lines_of

_SCRIPT = re.compile(r"(?:.*/)?(?:pretrain_\w+|finetune_\w*megatron\w*|\w*megatron\w*)\.py")
_FLAGS = frozenset({
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size",
    "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
})  # fmt: skip
_ENOUGH = 3


def is_megatron(launch: CommandLine) -> bool:
    """Whether the command starts a script that reads Megatron's arguments: by its name, or by what it is given."""
    given = len(arguments_of(launch).names & _FLAGS)
    named = launch.script is not None and _SCRIPT.fullmatch(launch.script.text) is not None
    return given >= (1 if named else _ENOUGH)


def arguments_of(launch: CommandLine) -> Arguments:
    """The flags of its Python script: those behind it, where a container or a wrapper stands in front."""
    given = launch.arguments
    if launch.script is None or launch.script.text.endswith(".py"):
        return given
    holds = [any(each.endswith(".py") for each in flag.values) for flag in given.flags]
    of_wrapper = (at for at, script in enumerate(holds, 1) if script)
    return replace(given, flags=given.flags[next(of_wrapper, 0) :])


def parse(text: str) -> Arguments:
    """The flags in `text`; blank lines and lines that begin with # are passed over."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines_of(text), 1):
        at = Position(number, len(line) - len(line.lstrip()) + 1)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            problems.append(Problem("file.syntax", f"the shell's quotes are not closed ({error})", at))
            continue
        if words and words[0].startswith("-"):
            name, equals, value = words[0].partition("=")
            flags.append(Flag(name, (value, *words[1:]) if equals else tuple(words[1:]), at))
        elif words:
            problems.append(Problem("file.syntax", f"{words[0]!r} is no flag: each line begins with one", at))
    return Arguments(tuple(flags), problems=tuple(problems))
