"""Megatron's arguments: megatron_args.txt (one flag with its values on each line), or the words of a command."""

from __future__ import annotations

import re
import shlex

from dslaunch.files.commands import CommandLine
from dslaunch.files.flags import Arguments, Flag
from dslaunch.files.position import Position, Problem

_SCRIPT = re.compile(r"(?:.*/)?(?:pretrain_\w+|finetune_\w*megatron\w*|\w*megatron\w*)\.py")
_FLAGS = frozenset({
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size",
    "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
})  # fmt: skip
_ENOUGH = 3


def is_megatron(launch: CommandLine) -> bool:
    """Whether the command starts a script that reads Megatron's arguments: by its name, or by what it is given."""
    given = len(launch.arguments.names & _FLAGS)
    named = launch.script is not None and _SCRIPT.fullmatch(launch.script.text) is not None
    return given >= (1 if named else _ENOUGH)


def parse(text: str) -> Arguments:
    """The flags in `text`; blank lines and lines that begin with # are passed over."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
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
