"""The words of #SBATCH lines as sbatch parts them: what is left over, and values that an option doesn't take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import launcher_options
from dslaunch.files.gaps import is_gap
from dslaunch.files.position import Position
from dslaunch.files.switches import SWITCHES
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs
from dslaunch.rules.slurm.options import BARE, FORMS, OPTIONAL, SRUN_OPTIONS, long_name

_RAN = "SchedMD/slurm:src/sbatch/opt.c, src/common/xstring.c; SLURM 22.05 sbatch --test-only, run"
_BEGIN = "#SBATCH"
_COMPONENTS = ("hetjob", "packjob")
_LOOKED_AT = 100
"""Words of one line, and options of one srun."""


@dataclass(frozen=True)
class Part:
    """One word of a line."""

    text: str
    column: int
    """From 1 on."""


def parts(line: str, start: int = 0) -> tuple[Part, ...]:
    """The words from `start` on: quotes keep blanks, a backslash the next letter, and # begins a comment."""
    found: list[Part] = []
    at = start
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        if line[at] == "#":
            break
        first, text, quote = at, "", ""
        while at < len(line) and (quote or not line[at].isspace()):
            letter = line[at]
            if letter == "\\" and at + 1 < len(line):
                at += 1
                text += line[at]
            elif letter == quote:
                quote = ""
            elif letter in "\"'" and not quote:
                quote = letter
            elif letter == "#" and not quote:
                return (*found, Part(text, first + 1))
            else:
                text += letter
            at += 1
        found.append(Part(text, first + 1))
    return tuple(found)


def read_lines(job: Job) -> Iterator[tuple[int, tuple[Part, ...]]]:
    """The lines with options that sbatch reads, by number: those above the first command."""
    for number, line in enumerate(job.file.lines, 1):
        if line.startswith(_BEGIN) and line[len(_BEGIN) :][:1].isspace():
            yield number, parts(line, len(_BEGIN))
        elif line.strip() and not line.lstrip().startswith("#"):
            return


@rule("slurm.stray-word", severity="error", raised_by="sbatch", evidence=_RAN)
def stray(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A word on an #SBATCH line that is neither an option nor its value, such as GB in --mem=512 GB."""
    for job in jobs(files):
        for number, words in read_lines(job):
            if len(words) == 1 and words[0].text in _COMPONENTS:
                continue
            if any(word.text == "{" for word in words) or is_gap(" ".join(word.text for word in words)):
                continue  # -p { partition }, -A <your account>: to be filled in
            for word, message in islice(_faults(words), _LOOKED_AT):
                at = Position(number, word.column)
                fix = "Put quotes around a value with a blank; write a comment behind #."
                yield Hit(job.file.name, at, f"{message}; sbatch refuses the script.", fix)


def _faults(words: Sequence[Part]) -> Iterator[tuple[Part, str]]:
    """The words that getopt_long leaves over, each with what is said of it."""
    taken = False
    for word in words:
        if taken:
            taken = False
        elif word.text.startswith("-") and len(word.text) > 1:
            name, equals, _ = word.text.partition("=") if word.text.startswith("--") else (word.text[:2], "", "")
            full = long_name(name)
            if not full:
                return
            if full in BARE and equals:
                yield word, f"{name} takes no value, and {word.text} gives one"
            elif full in FORMS and word.text[2:3] == "=" and len(name) == 2:
                yield word, f"the value of {name} stands right behind it, and {word.text[2:]!r} is none"
            taken = full not in BARE | OPTIONAL and not equals and (name.startswith("--") or len(word.text) == 2)
        elif not _is_gap(word.text):
            yield word, f"{word.text!r} is no option, and no option's value"


_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres", "--tres-per-task")
_NEEDS = {
    "--gpus-per-task": ("--gpus", "--ntasks", "--ntasks-per-node", "--tasks-per-node", "--nodes"),
    "--ntasks-per-gpu": (*_GPUS, "--ntasks", "--nodes"),
    "--gpus-per-socket": ("--sockets-per-node", "--extra-node-info"),
    "--mem-per-gpu": _GPUS,
}  # fmt: skip
"""Options that sbatch takes beside one of these alone."""


@rule(
    "slurm.needs", severity="error", raised_by="sbatch", evidence="SLURM 22.05 sbatch --test-only, run",
)  # fmt: skip
def needs(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option of sbatch's without the one that it needs, beside one that it excludes, or a range upside down."""
    for job in jobs(files):
        for name, others in _NEEDS.items():
            found = job.directive(name)
            if found and not any(job.directive(each) for each in others):
                unless = "--ntasks" in others  # which is often given to sbatch itself
                message = f"{name} without {' or '.join(others)}; sbatch refuses the script"
                message += ", unless its command line gives one." if unless else "."
                yield Hit(job.file.name, found.at, message, f"Add {others[0]}.", "info" if unless else None)
        both = job.directive("--cpus-per-gpu")
        if both and job.directive("--cpus-per-task"):
            message = "--cpus-per-gpu and --cpus-per-task exclude each other; sbatch refuses the script."
            yield Hit(job.file.name, both.at, message, "Keep one.")
        yield from _nodes(job)


def _nodes(job: Job) -> Iterator[Hit]:
    nodes, gpus = job.directive("--nodes"), job.number("--gpus")
    span = re.fullmatch(r"(\d+)-(\d+)", nodes.value) if nodes else None
    if nodes and span and int(span[1]) > int(span[2]):
        message = f"{nodes.name} {nodes.value} is a range upside down; sbatch refuses the script."
        yield Hit(job.file.name, nodes.at, message, "Write the smaller number first.")
    count, asked = job.number("--nodes"), job.directive("--gpus")
    if asked and gpus is not None and count is not None and gpus < count:
        message = f"{asked.name} {gpus} is below the {count} nodes; sbatch refuses the script."
        yield Hit(job.file.name, asked.at, message, "--gpus counts those of all nodes; --gpus-per-node of each.")


@rule(
    "slurm.srun-option", severity="error", raised_by="srun",
    evidence="SchedMD/slurm:src/common/slurm_opt.c 26.05, the manual page of srun 22.05, run",
)  # fmt: skip
def srun_option(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A misspelt option of srun: it prints its usage and exits. What is no slip may be a plugin's."""
    for file, command in files.launches():
        launcher = command.launcher("srun")
        for flag in launcher.options.flags[:_LOOKED_AT] if launcher else ():
            if not flag.name.startswith("--") or any(each.startswith(flag.name) for each in SRUN_OPTIONS):
                continue
            near = [_OF_OTHERS[flag.name]] if flag.name in _OF_OTHERS else []
            if near := near or get_close_matches(flag.name, SRUN_OPTIONS, n=1, cutoff=_SLIP):
                message = f"srun has no option {flag.name}, and exits."
                yield Hit(file.name, flag.at, message, f"Write {near[0]}.")


_OF_OTHERS = {
    "--cores-per-task": "--cpus-per-task", "--gpus-per-slot": "--gpus-per-task", "--nprocs": "--ntasks",
    "--nslots": "--ntasks",
}  # fmt: skip
"""Names that flux run has for srun's options."""
_LISTS = frozenset({"--container-mounts", "--export", "--exclude", "--gres", "--nodelist", "-w", "-x"})
_MOUNT = re.compile(r"/[^:\s=]*:/[^\s=]*|[A-Za-z_]\w*=\S*")
"""`/data:/data`, `NAME=value`: parts of an option's value, and no program."""


@rule("slurm.split-value", severity="error", raised_by="srun", evidence="SLURM 22.05, run")
def split_value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A blank within a list of srun's: what stands behind it is taken for the program."""
    for file, script in files.scripts():
        sruns = (command for command in script.commands if command.words[0].text == "srun")
        for command in islice(sruns, _LOOKED_AT):
            options, rest = launcher_options(command.words[1:], SWITCHES["srun"], joined=True)
            last = options.flags[-1] if options.flags else None
            if last is None or last.name not in _LISTS or not last.values or not rest or rest[0].text[:1] in "$`":
                continue
            if _MOUNT.fullmatch(rest[0].text) or last.values[-1].endswith(","):
                program = rest[0].text
                message = f"srun takes {program} for the program: {last.name} ends at the blank in front of it."
                yield Hit(file.name, rest[0].at, message, "Write a comma between the values, and no blank.")


_SLIP = 0.88


def _is_gap(text: str) -> bool:
    """A word of `<what the reader is to fill in>`, or of `{ this }`."""
    return "<" in text or ">" in text or "{" in text or "}" in text
