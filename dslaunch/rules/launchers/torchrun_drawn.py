"""What the nodes of a run have to agree upon, and each of them draws for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_SHARED = re.compile(r"--(?P<name>rdzv[-_]id|master[-_]port)(?:=(?P<value>.*))?", re.DOTALL)
_DRAWN = re.compile(
    r"\bS?RANDOM\b|\$\$|uuidgen|\bshuf\b|\$\(date\b|`date\b|mktemp|urandom|\$\(hostname|`hostname"
    r"|\$\{?HOSTNAME\b|SLURM_PROCID|SLURM_NODEID"
)
"""A number or a word that another node doesn't get."""
_WRAPPED = frozenset({"srun", "mpirun", "mpiexec", "pdsh", "ssh", "clush"})


@rule("torchrun.drawn", severity="hang", raised_by="torchrun", evidence="torchrun 2.13 on two agents, run")
def drawn(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A run's id or port that each node draws for itself: they never meet."""
    for file, script in files.scripts():
        for command in script.commands:
            words = command.words
            for at, word in enumerate(words):
                match = _SHARED.fullmatch(word.text)
                if match is None:
                    continue
                value = word if match["value"] else words[at + 1] if at + 1 < len(words) else None
                if value is not None and _is_drawn(file, script, value) and _on_each_node(command, value):
                    message = f"--{match['name']} is drawn on each node: the nodes wait for each other elsewhere."
                    fix = "Draw it once, before the nodes part, or write one: $SLURM_JOB_ID, or a number."
                    yield Hit(file.name, word.at, message, fix)


def _is_drawn(file: File, script: ShellScript, value: Word) -> bool:
    """Whether the word, or what the variable in it was set to, is another one on each node."""
    text = value.text.partition("=")[2] if value.text.startswith("--") else value.text
    if _DRAWN.search(text):
        return True
    names = re.findall(r"\$\{?(\w+)", text)
    set_to = [re.findall(rf"(?:^|[\s;]){name}=(.*)", file.text) for name in names]
    return any(len(found) == 1 and _DRAWN.search(found[0]) for found in set_to)


def _on_each_node(command: Command, value: Word) -> bool:
    """Whether several nodes fill it in: in a shell that srun starts, or in a script that each of them runs."""
    words = [word.text for word in command.words]
    programs = {word.rpartition("/")[2] for word in words}
    if programs & _WRAPPED:
        return value.late and "srun" in programs and bool(_DRAWN.search(value.text))
    nodes = ["", *(word.partition("=")[2] for word in words if word.startswith("--nnodes="))]
    nodes += [after for word, after in pairwise(words) if word == "--nnodes"]
    several = nodes[-1].isdecimal() and int(nodes[-1]) > 1
    return several and any(word.endswith("torchrun") for word in words[:2])
