"""Variables as a launch line reads them: options kept in one word, names that nothing sets, entries of arrays."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise

from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_option
from dslaunch.files.position import Lines, Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.files.switches import REMOTE
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.run import switches
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slips import is_slip
from dslaunch.rules.slurm.job import Job, jobs

_BASH = "the manual page of bash 5.2, run"
_REFERENCE = re.compile(r'"\$\{?(\w+)(?:\[\*\])?\}?"')
_ALONE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ENTRY = re.compile(r"\$\{(\w+)\[\$?\{?SLURM_ARRAY_TASK_ID\}?\]\}")
_LINE_OF = re.compile(r"""\bsed\s+-n\s+["']?\$\{?SLURM_ARRAY_TASK_ID\}?["']?p""")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::\d+)?)?")
_BROUGHT = re.compile(r"^\s*(?:source|\.)\s|(?<![-\w])(?:eval|getopts?)\s|\bset\s+-a\b", re.MULTILINE)
"""What may set variables that the script doesn't name."""
_TYPED = re.compile(r"(?:--[\w-]+=)?\\?\$(?:(\w+)|\{(\w+)\})(?=[\s\"'])")
"""A variable that is the whole value of an option, as it is typed."""
_NEAR = 0.6
_MOST_NAMES = 200
"""Variables that nothing sets, beyond which no more are looked at."""
_WHOLE = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ARRAY_SET = re.compile(r"\b(\w+)\+?=\(")


def _launching(files: FileSet) -> Iterator[tuple[File, ShellScript, Command]]:
    """The commands that start ranks, but for those that a further shell reads."""
    for file, script in files.scripts():
        started = {launch.at for launch in script.launches}
        for command in script.commands:
            inner = any(word.text in ("bash", "eval", "sh", "ssh") for word in command.words)
            if command.at in started and not inner and not file.inside:
                yield file, script, command


@rule("shell.quoted-options", severity="error", raised_by="nobody", evidence=_BASH)
def quoted(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Several options in a variable that stands in quotes: the program gets them as one word."""
    texts = {
        file.name: (file.places, {at for _, at in script.first_words}) for file, script in files.scripts()
    }
    for file, _, command in _launching(files):
        lines, said = texts[file.name]  # shell.array says the latter
        for before, word in pairwise(command.words):
            found = _REFERENCE.match(file.text, lines.offset(word.at)) if word.at not in said else None
            parts = word.text.split()
            is_value = is_option(before.text) and "=" not in before.text and before.text not in switches()
            several = len(parts) > 1 and ("=" not in parts[0] or any(each.startswith("--") for each in parts[1:]))
            if found and word.known and several and is_option(parts[0]) and not is_value:
                message = f"{found[0]} is one word of {len(parts)}: the program knows no such option."
                fix = f"Write ${found[1]} without quotes, or make it an array: \"${{{found[1]}[@]}}\"."
                yield Hit(file.name, word.at, message, fix)


@rule("shell.misspelt-variable", severity="wrong", raised_by="nobody", evidence=_BASH)
def misspelt(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option's value from a variable that nothing sets, beside one of nearly that name that nothing reads."""
    seen: dict[tuple[str, str], tuple[str, bool] | None] = {}
    for file, script, command in _launching(files):
        for before, word in pairwise(command.words):
            found = _ALONE.fullmatch(word.text)
            if found is None or not is_option(before.text):
                continue
            if file.holds(_BROUGHT):
                break
            name = found[1] or found[2]
            if name.startswith("SLURM_"):
                continue
            if (file.name, name) not in seen:
                if len(seen) >= _MOST_NAMES:
                    return  # what brings so many along isn't shown
                seen[file.name, name] = _near(file, script, name)
            if near := seen[file.name, name]:
                other, unread = near
                unused = f", and nothing reads {other}" if unread else ""
                message = f"nothing here sets ${name}{unused}: it is empty unless the environment has it."
                alike = is_slip(name, other) or set(other.split("_")) <= set(name.split("_"))
                fix = f"Set it here, or write ${other}."
                yield Hit(file.name, word.at, message, fix, None if alike and unread else "info")


@rule("shell.undefined-array", severity="wrong", raised_by="nobody", evidence=_BASH)
def undefined_array(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An array that nothing sets, among a launch's options: it is empty, and no environment can hold one."""
    arrays: dict[str, set[str]] = {}
    for file, _, command in _launching(files):
        for word in command.words if not file.holds(_BROUGHT) else ():
            found = _WHOLE.fullmatch(word.text)
            if found is None or file.holds(rf"(?<![\w$]){found[1]}\b(?!\[[@*]\]\}})"):
                continue
            used = {each[1] for other in command.words if (each := _WHOLE.search(other.text))}
            if file.name not in arrays:
                arrays[file.name] = {each[1] for each in _ARRAY_SET.finditer(file.text)}
            unread = {each for each in arrays[file.name] - used if not file.holds(rf"\$\{{{each}\[")}
            near = nearest(found[1], unread)
            message = f"nothing here sets the array {found[1]}: the command gets no word of it."
            fix = f"Correct the name, or set it.{near}"
            yield Hit(file.name, word.at, message, fix, None if near else "info")


@rule("shell.remote-variable", severity="error", raised_by="nobody", evidence="bash 5.2 and OpenSSH 9.2, run")
def remote_variable(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable of this script in a text that another host's shell reads: there nothing sets it."""
    for file, script in files.scripts():
        own = {each.name for each in script.assignments} | {each.name for each in script.passes}
        launched = {launch.at for launch in script.launches}
        named = {(each.at, each.name) for each in script.assignments}
        lines = file.places
        for command in script.commands:
            if command.at in launched and command.words[0].text in REMOTE and not file.inside:
                late = {word.at for word in command.words if word.late}
                here = {name for at, name in named if at in late} if late else set()
                yield from _unset_there(file, command, own - here, lines)


def _unset_there(file: File, command: Command, own: set[str], lines: Lines) -> Iterator[Hit]:
    late = [word for word in command.words if word.late]
    text = " ".join(word.text for word in late)
    if _BROUGHT.search(text):
        return
    there = set(re.findall(r"(?:^|[\s;])(\w+)=", text)) | set(re.findall(r"\b(?:for|read)\s+(\w+)", text))
    for before, word in pairwise(command.words):
        found = _TYPED.match(file.text, lines.offset(word.at)) if word.late else None
        name = (found[1] or found[2]) if found else ""
        if name in own - there and (is_option(before.text) or is_option(word.text)):
            message = f"the quotes leave ${name} to the other host's shell, where nothing sets it: it is empty."
            fix = "Put the text in double quotes, and \\$ before what is meant there."
            yield Hit(file.name, word.at, message, fix)


@rule("shell.prefix-variable", severity="error", raised_by="nobody", evidence=_BASH)
def prefix_variable(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """NAME=value in front of a command that has $NAME among its options: it is filled in before it is set."""
    for file, set_at, command in _launches(files):
        written = [each for each in command.environment if each.value or each.literal]  # not what an operator adds
        own = {each.at for each in written}
        in_front = [
            (each.name, 0) for each in written
            if not any(at < command.at and at not in own for at in set_at[each.name])
        ]  # fmt: skip
        for name, first in (*in_front, *_within(command, file.lines)):
            for ahead, word in pairwise(command.words[max(0, first - 1) :]):
                typed = re.search(rf"(?:^|=)\$(?:{name}\b|\{{{name}\}})", word.text)
                of_option = is_option(word.text) or is_option(ahead.text)
                if typed and of_option and (first or not word.late):
                    message = f"${name} is filled in before the assignment in front of the command: it is empty."
                    yield Hit(file.name, word.at, message, f"Set {name} in a command of its own before it.")


def _launches(files: FileSet) -> Iterator[tuple[File, Mapping[str, list[Position]], Command]]:
    """The commands that start ranks, and where the script around sets each variable."""
    for file, script in files.scripts():
        started = {launch.at for launch in script.launches}
        set_at: dict[str, list[Position]] = defaultdict(list)
        for each in script.assignments:
            set_at[each.name].append(each.at)
        yield from ((file, set_at, command) for command in script.commands if command.at in started)


def _within(command: Command, lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """NAME=value in front of a program in a text for a shell inside, with the index of the word behind."""
    words = command.words
    for index, (before, word, after) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        name, equals, given = word.text.partition("=")
        if f"${name}" in given or given.endswith(('"', "'", ";", "&&")):
            continue  # of a text that is printed, or a command of its own
        if after.at.line > word.at.line and not lines[after.at.line - 2].rstrip().endswith("\\"):
            continue
        program = after.text.rpartition("/")[2] in ("torchrun", "deepspeed", "python", "python3", "accelerate")
        if word.late and equals and name.isidentifier() and program and before.text not in ("export", "env"):
            yield name, index + 2


def _near(file: File, script: ShellScript, name: str) -> tuple[str, bool] | None:
    """A variable of nearly the name of one that nothing sets, and whether nothing reads it."""
    known = {each.name for each in script.assignments}
    if name in known or not _is_set_nowhere(name, file.text):
        return None
    for near in get_close_matches(name, known, n=1, cutoff=_NEAR):
        return near, not re.search(rf"\$\{{?#?{near}\b|\b{near}\b(?!=)", file.text)
    return None


def _is_set_nowhere(name: str, text: str) -> bool:
    """Whether the name stands in the script as `$NAME` alone, without a default, a test, `read` or `for`."""
    tested = rf"-[znv]\s+[\"']?(?:\$\{{?)?{name}\b"
    others = rf"\b(?:read|for|export|local|declare)\b[^\n]*\b{name}\b|\$\{{{name}:?[-=?+]"
    return not re.search(f"{others}|{tested}", text)


@rule(
    "slurm.array-entry", severity="error", raised_by="nobody", evidence=f"{_BASH}; the manual page of sbatch"
)
def entry(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A task of a job array that takes an entry of a list which has none of that number: they count from 0."""
    for job in jobs(files):
        asked = job.directive("--array")
        tasks = _tasks(asked.value) if asked else None
        if asked is None or tasks is None:
            continue
        yield from _lines_from_1(job, tasks[0])
        said: set[str] = set()
        for found in _ENTRY.finditer(job.file.text):
            count = job.script.arrays.get(found[1], 0)
            line = job.file.text[job.file.text.rfind("\n", 0, found.start()) + 1 : found.start()]
            if not count or tasks[1] < count or found[1] in said or line.lstrip().startswith("#"):
                continue
            said.add(found[1])
            message = f"task {tasks[1]} takes an entry of {found[1]}, whose {count} count from 0: it is empty."
            off_by_one = tasks == (1, count)
            fix = f"Write --array=0-{count - 1}." if off_by_one else f"Take tasks from 0 to {count - 1}."
            yield Hit(job.file.name, job.file.places.position(found.start()), message, fix)


def _lines_from_1(job: Job, first: int) -> Iterator[Hit]:
    """`sed -n "${SLURM_ARRAY_TASK_ID}p" FILE` for task 0."""
    for found in _LINE_OF.finditer(job.file.text) if first == 0 else ():
        line = job.file.text[job.file.text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not line.lstrip().startswith("#"):
            message = "task 0 asks sed for line 0, and lines count from 1: invalid usage of line address 0."
            fix = "Let --array begin with 1, or write $((SLURM_ARRAY_TASK_ID + 1))p."
            yield Hit(job.file.name, job.file.places.position(found.start()), message, fix)


def _tasks(value: str) -> tuple[int, int] | None:
    """The first and the last number of `1-6%3`, `0,2,4-8:2`; None where it isn't told."""
    parts = [_RANGE.fullmatch(part) for part in value.partition("%")[0].split(",")]
    numbers = [int(number) for part in parts if part for number in part.groups() if number]
    return (min(numbers), max(numbers)) if numbers and all(parts) else None
