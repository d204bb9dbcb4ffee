"""Values that sbatch takes, each judged by itself: the formats of its manual page sbatch(1)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_LIMIT = r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE"
_MEMORY = re.compile(r"(\d+[KMGT]?)?", re.IGNORECASE)
_PLANNED = re.compile(
    r"--(nodes|n?tasks.*|gres|gpus.*|cpus-per-task|exclusive|(no-)?requeue|open-mode|array)", re.IGNORECASE
)
"""Options that the plan decides, or that have a key of their own."""


def _time(value: str) -> str:
    if value and not re.fullmatch(_LIMIT, value, re.IGNORECASE):
        raise ValueError(
            f"is {value!r}. Allowed: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED, such as "
            "'12:00:00'"
        )
    return value


def _switches(value: str) -> str:
    if value and not re.fullmatch(rf"[1-9]\d*(@({_LIMIT}))?", value, re.IGNORECASE):
        raise ValueError(f"is {value!r}. Allowed: N or N@TIME, such as 1@00:30:00")
    return value


def _word(value: str) -> str:
    if any(letter.isspace() for letter in value):
        raise ValueError(f"is {value!r}. Write one word, without blanks and line ends")
    return value


def _nodes(value: str) -> str:
    depth = 0
    for letter in _word(value):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            break
    if depth:
        raise ValueError(f"is {value!r}, with a bracket too many. Write nodes such as n[1-2],m3")
    return value


def _memory(value: str) -> str:
    if not _MEMORY.fullmatch(value):
        raise ValueError(f"is {value!r}. Allowed: a number of megabytes, or with K, M, G or T, such as 900G")
    return value


def _option(line: str) -> str:
    if not line.startswith("--") or not line[2:3].isalpha():
        raise ValueError(f"{line!r} is no option. Write each as sbatch takes it, such as --mail-type=END")
    if "\n" in line or "\r" in line:
        raise ValueError(f"{line!r} is not one line of text. Give each line as an item of its own")
    name = re.split(r"[=\s]", line)[0]
    if _PLANNED.fullmatch(name):
        raise ValueError(
            f"{name} is decided by the plan. Take it out, and set cluster, launcher.slurm.cpus_per_task or "
            "launcher.slurm.exclusive or launcher.slurm.requeue instead"
        )
    return line


TimeLimit = Annotated[str, AfterValidator(_time)]
Switches = Annotated[str, AfterValidator(_switches)]
Word = Annotated[str, AfterValidator(_word)]
Nodes = Annotated[str, AfterValidator(_nodes)]
Memory = Annotated[str, AfterValidator(_memory)]
Options = Annotated[tuple[Annotated[str, AfterValidator(_option)], ...], Field(strict=False)]
