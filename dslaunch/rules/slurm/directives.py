"""`#SBATCH` lines: what sbatch refuses, and what it passes over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePath

from dslaunch.errors import nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.gaps import is_gap
from dslaunch.files.position import START, Position
from dslaunch.files.script import Directive, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Edit, Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slips import is_slip
from dslaunch.rules.slurm.job import Job, jobs
from dslaunch.rules.slurm.options import FORMS, OPTIONAL, OPTIONS, long_name

_RAN = "SLURM 22.05 sbatch --test-only, run"
_PAGE = "the manual page of sbatch, SLURM 22.05 to 25.05"
_PLUGINS = ("--container-", "--no-container-")
"""Options that a plugin adds (pyxis)."""
_MEMORY = frozenset({"--mem", "--mem-per-cpu", "--mem-per-gpu"})
_LOOKS_LIKE = re.compile(r"#\s*(\w+)\s+-{1,2}[A-Za-z]")


@rule("slurm.unknown-option", severity="error", raised_by="sbatch", evidence=f"{_PAGE}; {_RAN}")
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option that sbatch doesn't know, or an abbreviation of several: the job isn't taken."""
    for job in jobs(files):
        for each in job.script.directives:
            if each.read and not long_name(each.name) and not each.name.startswith(_PLUGINS):
                several = sorted(option for option in OPTIONS if option.startswith(each.name))
                what = f"may be {' or '.join(several[:4])}" if several else "is no option of sbatch"
                slips = [name for name in OPTIONS if is_slip(each.name, name)]
                plugins = each.name.startswith("--") and not several and not slips
                unless = ", unless a plugin of the cluster's has it" if plugins else ""
                near = nearest(each.name, slips)
                fix = f"Write the full name.{near}" if several or near else "Take it out."
                message = f"{each.name} {what}; sbatch refuses the script{unless}."
                yield Hit(job.file.name, each.at, message, fix, "info" if plugins else None)


@rule("slurm.value", severity="error", raised_by="sbatch", evidence=f"{_PAGE}; {_RAN}")
def value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value in a form that sbatch doesn't read, such as --time=48h, or two that exclude each other."""
    for job in jobs(files):
        for each in job.script.directives:
            form = FORMS.get(long_name(each.name)) if _is_its_own(job, each) else None
            if form and each.read and not _is_open(job, each) and not form[0].fullmatch(each.value):
                message = f"{each.name} {each.value!r}: sbatch takes {form[1]}, and refuses the script."
                of_kjob = _RESOURCE.fullmatch(each.value) is not None
                message += " Kueue's kjob takes it." if of_kjob else ""
                yield Hit(job.file.name, each.at, message, f"Write {form[1]}.", "info" if of_kjob else None)
        yield from _named_nodes(job)
        # A component of a heterogeneous job takes over the others' --mem.
        memory = [each for each in job.script.directives if each.read and long_name(each.name) in _MEMORY]
        if len({long_name(each.name) for each in memory}) > 1:
            names = " and ".join(each.name for each in memory)
            message = f"{names} exclude each other; sbatch refuses the script."
            yield Hit(job.file.name, memory[-1].at, message, "Keep one.")


_RESOURCE = re.compile(r"[\w-]+(?:\.[\w-]+)+/[\w-]+(?::\d+)?")
"""`nvidia.com/gpu:8`: a resource of Kubernetes, in a script for kjobctl create slurm."""


def _is_open(job: Job, each: Directive) -> bool:
    """Whether the value is to be filled in; one in #, which begins a comment, stands behind the option alone."""
    behind = "" if each.given else job.file.lines[each.at.line - 1][each.at.column - 1 + len(each.name) :]
    gap = "{" in each.value or each.value.startswith("<")
    return gap or not is_told(each.value) or any(map(is_gap, behind.lstrip(" =").split()[:1]))


_LISTED = re.compile(r"[\w.-]+(?:\[(?P<span>[\d,-]+)\])?")


def _named_nodes(job: Job) -> Iterator[Hit]:
    """More nodes by name than --nodes."""
    named, nodes = job.directive("--nodelist"), job.number("--nodes")
    parts = re.split(r",(?![^\[]*\])", named.value) if named else []
    found = [_LISTED.fullmatch(part) for part in parts]
    if named is None or nodes is None or not all(found):
        return
    spans = (each["span"] for each in found if each)
    count = sum(_counted(span) if span else 1 for span in spans)
    if count > nodes:
        message = f"{named.name} names {count} nodes, and --nodes is {nodes}; sbatch refuses the script."
        yield Hit(job.file.name, named.at, message, f"Write --nodes={count}, or name {nodes}.")


def _counted(span: str) -> int:
    """How many numbers `1-4,7` has."""
    ends = (part.partition("-") for part in span.split(","))
    return sum(int(last) - int(first) + 1 if last and first else 1 for first, _, last in ends)


def _is_its_own(job: Job, each: Directive) -> bool:
    """Whether a value is the option's: where it may be left out it stands behind =."""
    if long_name(each.name) not in OPTIONAL or not each.value or each.given:
        return True
    line = job.file.lines[each.at.line - 1]
    return line[each.at.column - 1 + len(each.name) :].startswith("=")


@rule("slurm.variable", severity="wrong", raised_by="nobody", evidence=f"{_PAGE}; {_RAN}")
def variable(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A shell variable on an #SBATCH line: sbatch takes it as it is written."""
    for job in jobs(files):
        for each in job.script.directives:
            if each.read and not each.given and re.search(r"\$\{?\w", each.value):
                message = (
                    f"{each.name}={each.value}: sbatch fills in no variables, it takes the text as it is."
                )
                yield Hit(
                    job.file.name,
                    each.at,
                    message,
                    "Write the value, use %j and the like, or pass it to sbatch.",
                )


@rule("slurm.late-directive", severity="wrong", raised_by="nobody", evidence=f"{_PAGE}; {_RAN}")
def late(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An #SBATCH line after the first command, where sbatch no longer looks."""
    for job in jobs(files):
        for each in job.script.directives:
            if not each.read:
                message = f"{each.name} stands after the first command: sbatch no longer reads it."
                yield Hit(job.file.name, each.at, message, "Move it above the first command.")


_FRONT_ENDS = frozenset({"QBATCH", "XBATCH", "YBATCH"})
"""Lines of programs that submit to several schedulers, and read their own."""


@rule("slurm.misspelt-directive", severity="wrong", raised_by="nobody", evidence=f"{_PAGE}; {_RAN}")
def misspelt(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A line that only looks like #SBATCH: a comment to sbatch."""
    for job in jobs(files):
        for number, line in enumerate(job.file.lines, 1):
            match = _LOOKS_LIKE.match(line)
            if (
                match is None
                or line.startswith("#SBATCH ")
                or not (match[1].isupper() or line[1:2].isalpha())
            ):
                continue
            alike = difflib.SequenceMatcher(None, match[1].upper(), "SBATCH").ratio() > 0.8
            if alike and match[1] not in _FRONT_ENDS:
                old = line[: match.end(1)]
                meant = old == "# SBATCH" and any(each.read and not each.given for each in job.script.directives)
                yield Hit(
                    job.file.name, Position(number, 1), f"{old!r} isn't `#SBATCH`: sbatch takes it as a comment.",
                    "Write `#SBATCH` with no blank and in capitals; `##SBATCH` switches a line off.",
                    "info" if meant else None, edit=None if meant else Edit(Position(number, 1), old, "#SBATCH"),
                )  # fmt: skip


@rule("slurm.script-form", severity="error", raised_by="sbatch", evidence=f"{_PAGE}; {_RAN}")
def form(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script that sbatch doesn't take as one: no #! in line 1, or line ends of DOS."""
    for job in jobs(files):
        if not (job.file.text.lstrip("\n") if job.file.inside else job.file.text).startswith("#!"):
            fix = "Begin the file with #!/bin/bash."
            yield Hit(
                job.file.name, START, "the first line names no interpreter; sbatch refuses the script.", fix
            )
        if "\r\n" in job.file.text:
            fix = "Save it with line feeds alone."
            yield Hit(job.file.name, START, "the lines end as in DOS; sbatch refuses the script.", fix)


@rule("slurm.array-output", severity="wrong", raised_by="nobody", evidence=f"{_PAGE}; {_RAN}")
def array_output(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A job array whose tasks write into one file."""
    for job in jobs(files):
        output = job.directive("--output")
        if (
            job.directive("--array")
            and output
            and not re.search(r"%\d*[aAjJx]", output.value.replace("%A", ""))
        ):
            message = f"every task of the array writes into {output.value}, one over the other."
            yield Hit(job.file.name, output.at, message, "Put %A_%a into the name.")


@rule(
    "slurm.het-array", severity="error", raised_by="sbatch",
    evidence=f"SchedMD/slurm:doc/html/heterogeneous_jobs.shtml, Limitations; {_RAN}",
)  # fmt: skip
def het_array(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A job array of heterogeneous jobs: sbatch refuses it."""
    for job in jobs(files):
        read = [each for each in job.script.directives if each.read]
        arrays = [each for each in read if long_name(each.name) == "--array"]
        if arrays and any(each.component for each in read):
            message = "SLURM has no arrays of heterogeneous jobs (`#SBATCH hetjob`); sbatch refuses the script."
            yield Hit(job.file.name, arrays[0].at, message, "Take --array out, and submit a job for each task.")


@rule("slurm.output-folder", severity="wrong", raised_by="nobody", evidence=f"{_PAGE}; SLURM 22.05, run")
def output_folder(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The folder of --output isn't there, or made by the script itself, too late: the job fails without a word."""
    for job in jobs(files):
        own, others = _made(job.script), {name for _, each in files.scripts() for name in _made(each)}
        logs = filter(None, (job.directive("--error"), job.directive("--output")))
        for folder, found in {_clean(each.value.rpartition("/")[0]): each for each in logs}.items():
            if not folder or "$" in folder or (folder.startswith("/") and folder not in own):
                continue
            if folder.startswith("~"):
                message = f"sbatch fills in no ~: it looks for a folder of that name, {folder}, and the job fails."
                yield Hit(job.file.name, found.at, message, "Write the whole path.")
                continue
            beside = str(PurePath(job.file.name).parent / folder)
            if folder in own:
                message = f"{folder} is made by this script, and SLURM opens the file before: the job fails."
                yield Hit(job.file.name, found.at, message, f"Make {folder} before sbatch is called.")
            elif folder not in others and beside not in files.folders:
                message = f"SLURM makes no {folder}: where it is missing the job fails at once, without output."
                fix = f"Make {folder} where sbatch is called."
                yield Hit(job.file.name, found.at, message, fix, "info")


def _made(script: ShellScript) -> set[str]:
    """Folders that a script makes."""
    makes = (command for command in script.commands if command.words[0].text == "mkdir")
    return {_clean(word.text) for command in makes for word in command.words[1:]}


def _clean(folder: str) -> str:
    return folder.rstrip("/").removeprefix("./")


@rule(
    "slurm.requeue-log", severity="info", raised_by="nobody", evidence=f"{_PAGE}: JobFileAppend, --open-mode"
)
def requeue_log(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A job that may be requeued begins its log anew each time."""
    for job in jobs(files):
        requeue = job.directive("--requeue")
        if requeue and not job.directive("--open-mode"):
            message = "a requeued job truncates its log, and with it the reason why it was requeued."
            yield Hit(job.file.name, requeue.at, message, "Add #SBATCH --open-mode=append.")
