"""The commands of `sbatch --wrap "..."`, read as the batch script that sbatch makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dslaunch.files import script
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word, launcher_options
from dslaunch.files.heredoc import Written
from dslaunch.files.script import Command, Directive
from dslaunch.files.switches import SBATCH
from dslaunch.rules.shell.heredocs import Inner

_OPTION = "--wrap"
_FIRST_LINE = "#!/bin/sh"
_MOST = 20
"""Lines with it in one script that are read."""


def in_wraps(files: FileSet) -> Iterator[Inner]:
    """What each of them runs, with the options of its line."""
    for file, outer in files.scripts():
        held = (command for command in outer.commands if _OPTION in file.text and _submits(command))
        for command in islice(held, _MOST):
            options, _ = launcher_options(command.words[1:], SBATCH, joined=True)
            word = _wrapped(command)
            if word is None or word.at.line == 1:
                continue
            given = tuple(
                Directive(flag.name, flag.values[0] if flag.values else "", flag.at, read=True, given=True)
                for flag in options.flags if flag.name != _OPTION
            )  # fmt: skip
            joined = len(_OPTION) + 1 if word.text.startswith(f"{_OPTION}=") else 0
            front = _FIRST_LINE + "\n" * (word.at.line - 1) + " " * (word.at.column + joined)
            text = front + word.text[joined:]
            value = script.parse(text, given)
            inner = File(file.name, "shell", text, value, inside=True)
            yield Inner(inner, Written(text, word.known, file.text, word.at, ()), file)


def _submits(command: Command) -> bool:
    return command.words[0].text.rpartition("/")[2] == "sbatch"


def _wrapped(command: Command) -> Word | None:
    """The word that holds the commands."""
    words = command.words
    for at, word in enumerate(words):
        if word.text.startswith(f"{_OPTION}="):
            return word
        if word.text == _OPTION and at + 1 < len(words):
            return words[at + 1]
    return None
