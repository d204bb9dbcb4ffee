"""Commands that are given as a list of words, which no shell parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import as_list, workloads
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_COMMAND_OPTION = re.compile(r"-[a-z]*c")
_PROGRAM = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|mpirun|python[\d.]*)")
_LINE = re.compile(r"(?:.*/)?(?:torchrun|deepspeed|accelerate|mpirun|python[\d.]*)\s+\S.*", re.DOTALL)
_PAIR = re.compile(r"--?[A-Za-z][\w-]*\s+\S+")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_EVIDENCE = "the manual page of bash 5.2, -c; the documentation of Kubernetes 1.33: command and args; run"
Words = Sequence[tuple[Path, str]]


@rule("container.words", severity="error", raised_by="nobody", evidence=_EVIDENCE)
def words(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A list of words that isn't parted as it is meant: `bash -c` with several, or two in one."""
    for file in files.of("kubernetes", "compose"):
        for given in _given(file):
            for path, message, fix in _faults(given):
                yield Hit(file.name, file.at(*path), message, fix)
    for file, script in files.scripts():
        lines = file.places
        for command in script.commands:
            for one, two in pairwise(enumerate(command.words[:-2])):
                program = command.words[two[0] + 1]
                called = _SHELL.fullmatch(one[1].text) and _COMMAND_OPTION.fullmatch(two[1].text)
                if called and two[0] + 2 < len(command.words) and _PROGRAM.fullmatch(program.text):
                    at, front = lines.offset(program.at), lines.offset(two[1].at) + len(two[1].text)
                    bare = file.text.startswith(program.text, at)  # neither quotes nor a variable
                    if bare and front < at and not file.text[front:at].strip(" \t\\\n"):
                        yield Hit(file.name, program.at, _one(program.text), "Put the whole command in quotes.")


def _given(file: File) -> Iterator[Words]:
    """The words of each container, or of each service that has a list of them."""
    if file.kind == "kubernetes":
        for workload in workloads(file.value):
            for pods in workload.kinds:
                yield from (container.words for container in pods.all_containers)
        return
    for name, service in file.value["services"].items():
        if isinstance(service, dict):
            lists = [(key, as_list(service.get(key))) for key in ("entrypoint", "command")]
            yield [
                (("services", name, key, index), each)
                for key, each_of in lists for index, each in enumerate(each_of) if isinstance(each, str)
            ]  # fmt: skip


def _faults(given: Words) -> Iterator[tuple[Path, str, str]]:
    texts = [text for _, text in given]
    if len(texts) > 1 and _SHELL.fullmatch(texts[0]):
        at = next((index for index, text in enumerate(texts) if index and _COMMAND_OPTION.fullmatch(text)), 0)
        if at and len(texts) > at + 2 and _PROGRAM.fullmatch(texts[at + 1]):
            yield given[at + 1][0], _one(texts[at + 1]), "Write the command as one text, or without the shell."
        return
    if texts and _LINE.fullmatch(texts[0]) and not _is_path(texts[0]):
        name = texts[0].split()[0]
        message = f"no shell parts this: a program is looked for that is called {name} and all behind it."
        yield given[0][0], message, "Write each word as one item."
        return
    if not texts or not _PROGRAM.fullmatch(texts[0]):
        return
    pairs = [
        (path, text) for (_, before), (path, text) in pairwise(given)
        if _PAIR.fullmatch(text) and not _FLAG.fullmatch(before)
    ]  # fmt: skip
    if pairs:
        path, text = pairs[0]
        more = f", as {len(pairs) - 1} more do" if len(pairs) > 1 else ""
        message = f"no shell parts {text!r}: it reaches the program as one argument{more}, which it doesn't know."
        yield path, message, "Write the option and its value as two items, or join them by =."


def _one(program: str) -> str:
    return f"-c takes one text: {program} runs without arguments, and those behind it are $0, $1 and so on."


def _is_path(text: str) -> bool:
    """Whether a blank stands in a folder's name: /opt/my python/bin/python."""
    return "/" in text.split()[-1] and "-" not in text
