"""What the nodes of a run have to agree upon, and each of them draws for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from dslaunch.files.blocks import ends
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Word
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import jobs

_SHARED = re.compile(r"--(?P<name>rdzv[-_]id|master[-_]port)(?:=(?P<value>.*))?", re.DOTALL)
_DRAWN = re.compile(
    r"\bS?RANDOM\b|\$\$|uuidgen|\bshuf\b|\$\(date\b|`date\b|mktemp|urandom|\$\(hostname|`hostname"
    r"|\$\{?HOSTNAME\b|SLURM_PROCID|SLURM_NODEID|python3? -c.*\bsocket\b",
    re.DOTALL,
)
"""A number or a word that another node doesn't get."""
_SEEDED = re.compile(r"(?:^|[\s;'\"])RANDOM=", re.MULTILINE)
"""Each node then draws the same."""
_TYPED = re.compile(r"(?:[^\s$`'\"]|\$\(\([^)]*\)\)|\$\([^)]*\)|`[^`]*`|\$\{?\w+\}?|\$\$)+")
"""A word as it is typed in a text for a shell inside."""
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
                if value is not None and _is_drawn(file, script, value) and _on_each_node(file, command, value):
                    message = f"--{match['name']} is drawn on each node: the nodes wait for each other elsewhere."
                    fix = "Draw it once, before the nodes part, or write one: $SLURM_JOB_ID, or a number."
                    yield Hit(file.name, word.at, message, fix)


def _is_drawn(file: File, script: ShellScript, value: Word) -> bool:
    """Whether the word, or what the variable in it was set to, is another one on each node."""
    text = value.text.partition("=")[2] if value.text.startswith("--") else value.text
    if _SEEDED.search(file.text):
        return False
    if _DRAWN.search(text):
        return True
    names = re.findall(r"\$\{?(\w+)", text)
    set_to = [re.findall(rf"(?:^|[\s;]){name}=(.*)", file.text) for name in names]
    return any(len(found) == 1 and _DRAWN.search(found[0]) for found in set_to)


def _on_each_node(file: File, command: Command, value: Word) -> bool:
    """Whether several nodes fill it in: in a shell that srun starts, or in a script that each of them runs."""
    script: ShellScript = file.value
    words = [word.text for word in command.words]
    programs = {word.rpartition("/")[2] for word in words}
    nodes = ["", *(word.partition("=")[2] for word in words if word.startswith("--nnodes="))]
    nodes += [after for word, after in pairwise(words) if word == "--nnodes"]
    if not programs & _WRAPPED:
        return _several(script, nodes[-1], False) and any(word.endswith("torchrun") for word in words[:2])
    start = file.places.offset(value.at)
    word = _TYPED.match(file.text, start)
    typed = word[0] if word else ""
    name = re.match(r"(?:--[\w-]+=)?\$\{?(\w+)", typed)
    inside = name is not None and any(
        word.late and word.text.startswith(f"{name[1]}=") and _DRAWN.search(word.text) for word in command.words
    )
    own = inside or _DRAWN.search(typed) is not None
    if words[0] == "ssh" and not value.late and _is_looped(file, start):
        return _DRAWN.search(typed) is not None and _several(script, nodes[-1], False)  # anew in each pass
    return value.late and own and _several(script, nodes[-1], "srun" in programs)


def _is_looped(file: File, at: int) -> bool:
    around = (start for start, end in ends(file.text).items() if start < at < end)
    return any(file.text.startswith(("for", "while", "until"), start) for start in around)


def _several(script: ShellScript, nodes: str, by_srun: bool) -> bool:
    """Whether the run has several nodes."""
    if nodes.isdecimal():
        return int(nodes) > 1
    asked = script.directive("--nodes", "-N")
    return bool(by_srun and nodes and asked is not None and asked.value.isdecimal() and int(asked.value) > 1)


@rule("slurm.drawn-port", severity="hang", raised_by="nobody", evidence="SLURM 22.05 and torch 2.13, run")
def drawn_port(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """MASTER_PORT drawn within each task of a step on several nodes: each waits at another one."""
    for job in jobs(files):
        for command in job.script.commands:
            several = command.words[0].text == "srun" and job.nodes is not None and job.nodes > 1
            several = several and not _SEEDED.search(job.file.text)
            for word in command.words if several else ():
                if word.late and word.text.startswith("MASTER_PORT=") and _DRAWN.search(word.text):
                    message = "MASTER_PORT is drawn in each task: the nodes wait for each other elsewhere."
                    fix = "Set it in front of srun, of the job's id: $((20000 + SLURM_JOB_ID % 20000))."
                    yield Hit(job.file.name, word.at, message, fix)
