"""Files within a shell script: what it writes, or hands to another shell, between `<<EOF` and `EOF`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from dslaunch.files import envfile, hostfile, relaxed_json, script, yaml_text
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.heredoc import PIECE, Heredoc, Written
from dslaunch.files.kinds import json_kind, text_kind, yaml_kind
from dslaunch.files.position import Lines, Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.known import told
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_BASH = "the manual page of bash 5.2, Here Documents; run"
_MOST = 20
"""Heredocs of one script that are read."""
_MANY = 8
"""Shell scripts, beyond which each stands for a run of its own: what one writes is held against itself alone."""
_MEANT = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""Of these a text that is meant to be a DeepSpeed JSON has one."""
_TARGET = re.compile(r">>?\s*([^\s<>|&;]+)")
"""Where a command's output goes."""
_MANIFEST = re.compile(r"^apiVersion:\s", re.MULTILINE)
_BATCH = re.compile(r"^#SBATCH\s", re.MULTILINE)
_SHELL_LINE = re.compile(r"\s*#!.*\b(?:ba|z|da)?sh\b")
_MOVED = ("deepspeed_json", "kubernetes", "shell")
"""Kinds whose positions are those of the text within."""
_CHANGE = frozenset({":", "awk", "envsubst", "j2", "jinja2", "jq", "m4", "perl", "sed", "yq"})
"""Programs that make another text of it; `:` takes it for a remark."""
_SHELLS = frozenset({"bash", "sbatch", "sh", "srun", "ssh"})
"""Commands that read what they run from their input."""


@dataclass(frozen=True)
class Inner:
    """A file within another: of a heredoc, or what a manifest's container runs."""

    file: File
    written: Written
    outer: File

    def beside(self, files: FileSet) -> FileSet:
        """It, with those of the files that it doesn't stand for."""
        json, shell = self.file.kind == "deepspeed_json", self.file.kind == "shell"
        many = len(files.of("shell")) > _MANY
        others = (
            file for file in files.files
            if not (json and file.kind == "deepspeed_json") and not (shell and file is self.outer)
            and not (many and file.kind == "shell" and file is not self.outer)
        )  # fmt: skip
        return FileSet((self.file, *others), files.folders)

    def known(self, settings: Settings) -> Settings:
        """The settings, with what the file itself says of ranks where nothing else does."""
        if self.outer.kind != "shell" or settings.world_size is not None:
            return settings
        if self.file.kind == "accelerate":
            return told(FileSet((self.file, self.outer)), settings)
        return told(FileSet((self.file,)), settings) if self.file.kind == "shell" else settings

    def moved(self, hit: Hit) -> Hit | None:
        """The hit where it stands in the script; None where its word isn't told."""
        lines = self.written.text.rstrip("\n").split("\n")
        if hit.at is None or hit.name != self.file.name or self.file.kind not in _MOVED:
            return hit
        if not self.written.start.line <= hit.at.line <= len(lines):
            return hit  # of the script around it
        line = lines[hit.at.line - 1]
        word = line[hit.at.column - 1 :].partition(" -")[0]  # an option and its value
        if line.startswith("#SBATCH") and "$" in word and not self.written.told:
            return None
        return replace(hit, at=self.written.at(hit.at), edit=None)

    def at_home(self, hit: Hit) -> Iterator[Hit]:
        """The hit where it stands in the script."""
        if (moved := self.moved(hit)) is not None:
            yield moved


def in_heredocs(files: FileSet) -> Iterator[Inner]:
    """The DeepSpeed JSONs, hostfile, .deepspeed_env and scripts that shell scripts write."""
    hostfiles: list[Inner] = []
    for file, outer in files.scripts():
        bodies = (
            (command, command.heredoc) for command in outer.commands
            if command.heredoc is not None and command.words[0].text.rpartition("/")[2] not in _CHANGE
        )  # fmt: skip
        for command, body in islice(bodies, _MOST):
            should = not body.expands and _meant(body.text) and bool(_named(body))
            if should and _filled_later(file):
                continue
            meant = replace(body, expands=True) if should else body
            for written in meant.written(_elsewhere(outer)):
                found = _read(file, outer, command, body, written)
                hostfiles += [found] if found and found.file.kind == "hostfile" else []
                if found and found.file.kind != "hostfile":
                    yield found
    if len(hostfiles) == 1 and not files.of("hostfile"):
        yield hostfiles[0]  # which of several a launch line names isn't told


def _read(
    file: File, outer: ShellScript, command: Command, body: Heredoc, written: Written
) -> Inner | None:
    """What one text is, where it is any kind that rules know."""
    if body.text.lstrip().startswith("{"):
        return _json(file, written)
    if _MANIFEST.search(body.text):
        return _manifest(file, written)
    if _is_script(command, body):
        value = script.parse(written.text)
        inner = File(file.name, "shell", written.text, value, problems=value.problems, inside=True)
        return Inner(inner, written, file)
    return _launchers_own(file, outer, body, written)


def _manifest(file: File, written: Written) -> Inner | None:
    """Objects of Kubernetes, which kubectl reads from its input or from the file that is written."""
    try:
        document = yaml_text.parse(written.text)
    except yaml_text.YamlError:
        return None
    if yaml_kind("", document.value) != "kubernetes":
        return None
    positions = MappingProxyType({(): written.start, **document.positions})
    inner = File(file.name, "kubernetes", written.text, document.value, positions, inside=True)
    return Inner(inner, written, file)


def _json(file: File, written: Written) -> Inner | None:
    """A DeepSpeed JSON, or what is meant to be one and can't be read."""
    try:
        document = relaxed_json.parse(written.text)
    except relaxed_json.JsonSyntaxError as error:
        if not written.told or not any(f'"{key}"' in written.text for key in _MEANT):
            return None
        broken = File(file.name, "deepspeed_json", file.text, problems=(error.problem,), inside=True)
        return Inner(broken, written, file)
    if not written.told or json_kind("", document.value) != "deepspeed_json":
        return None
    positions = MappingProxyType({(): written.start, **document.positions})
    inner = File(file.name, "deepspeed_json", file.text, document.value, positions, inside=True)
    return Inner(inner, written, file)


def _is_script(command: Command, body: Heredoc) -> bool:
    """A script of a shell's: by its first line or its directives, or what a shell reads from its input."""
    return bool(
        _SHELL_LINE.match(body.text)
        or _BATCH.search(body.text)
        or command.words[0].text.rpartition("/")[2] in _SHELLS
    )


def _launchers_own(file: File, outer: ShellScript, body: Heredoc, written: Written) -> Inner | None:
    """A hostfile or .deepspeed_env of DeepSpeed's launcher that a script with its launch line writes."""
    lines = file.lines
    target = _TARGET.search(lines[body.at.line - 2]) if 1 < body.at.line <= len(lines) + 1 else None
    name = target[1].rpartition("/")[2].strip("\"'") if target else ""
    if config := _accelerate(file, outer, name, written):
        return config
    if not name or not written.told or not any(each.launcher("deepspeed") for each in outer.launches):
        return None
    text, above = written.text.lstrip("\n"), body.at.line - 1
    kind = text_kind(name, text)
    if kind == "hostfile":
        hosts = (replace(each, line=each.line + above) for each in hostfile.parse(text))
        return Inner(File(file.name, kind, file.text, tuple(hosts), inside=True), written, file)
    if kind == "deepspeed_env":
        entries = (
            replace(each, at=Position(each.at.line + above, each.at.column)) for each in envfile.parse(text)
        )
        return Inner(File(file.name, kind, file.text, tuple(entries), inside=True), written, file)
    return None


def _accelerate(file: File, outer: ShellScript, name: str, written: Written) -> Inner | None:
    """A configuration of accelerate's that the script launches with."""
    launchers = (each.launcher("accelerate") for each in outer.launches)
    named = (each.options.value("--config_file", "--config-file") or "" for each in launchers if each)
    wanted = {each.rpartition("/")[2] for each in named}
    variable = name.removeprefix("$").strip("{}")
    held = outer.variable(variable) if name.startswith("$") else name
    base = (held or "").rpartition("/")[2]
    if not written.told or not base.endswith((".yaml", ".yml")) or base not in wanted:
        return None
    try:
        document = yaml_text.parse(written.text)
    except yaml_text.YamlError as error:
        broken = File(file.name, "accelerate", file.text, problems=(error.problem,), inside=True)
        return Inner(broken, written, file)
    positions = MappingProxyType({(): written.start, **document.positions})
    inner = File(file.name, "accelerate", file.text, document.value, positions, document.problems, inside=True)
    return Inner(inner, written, file)


def _elsewhere(outer: ShellScript) -> dict[str, str]:
    """Variables that the script sets once, or to one value outside of conditions."""
    times = Counter(each.name for each in outer.assignments)
    once = {each.name: each.value for each in outer.assignments if each.literal and times[each.name] == 1}
    return once | outer.settled


def _meant(text: str) -> bool:
    """Whether a text is to be a DeepSpeed JSON."""
    return text.lstrip().startswith("{") and any(f'"{key}"' in text for key in _MEANT)


def _filled_later(file: File) -> bool:
    """Whether a script has what fills variables into a text that is written already."""
    return "envsubst" in file.text or re.search(r"\bsed\b", file.text) is not None


def _named(body: Heredoc) -> list[re.Match[str]]:
    """The variables in a text, but those behind a backslash."""
    return [found for found in PIECE.finditer(body.text) if not found["escaped"]]


@rule("shell.quoted-heredoc", severity="error", raised_by="DeepSpeedConfig", evidence=_BASH)
def quoted(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Variables in a DeepSpeed JSON behind <<'EOF': the quotes keep the shell from filling them in."""
    for file, outer in files.scripts():
        for command in outer.commands:
            body = command.heredoc
            names = _named(body) if body is not None and not body.expands and _meant(body.text) else []
            if body is not None and names and not _filled_later(file):
                first = names[0]
                message = f"the delimiter is quoted, so {first[0]} is written as it stands: no JSON."
                yield Hit(file.name, _place(body, first), message, "Write <<EOF without quotes.")


@rule("shell.heredoc-variable", severity="wrong", raised_by="nobody", evidence=_BASH)
def too_early(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable of the script in a heredoc, filled in when the text is written: there it is empty."""
    for file, outer in files.scripts():
        for command in outer.commands:
            body = command.heredoc
            if body is not None and body.expands and _is_script(command, body):
                yield from _empty(file, outer, body)


def _empty(file: File, outer: ShellScript, body: Heredoc) -> Iterator[Hit]:
    """The first place of each variable that the text itself sets, or that SLURM sets in the job."""
    inside = range(body.at.line, body.at.line + body.text.count("\n") + 1)
    set_outside = {each.name for each in outer.assignments if each.at.line not in inside}
    in_job = any(each.read for each in outer.directives) or "SLURM_" in file.text.partition(body.text)[0]
    own = {found[1]: found.end() for found in reversed([*_SETS.finditer(body.text)])}
    for found in {each["name"] or each["braced"]: each for each in reversed(_named(body))}.values():
        name = found["name"] or found["braced"]
        of_job = name.startswith("SLURM_") and _BATCH.search(body.text) is not None and not in_job
        of_text = name in own and found.start() > body.text.find("\n", own[name]) > 0 and name not in _INHERITED
        if name not in set_outside and name not in body.values and (of_job or of_text):
            who = "SLURM" if of_job else "this script"
            message = f"{found[0]} is filled in when the text is written, before {who} sets it: it is empty."
            fix = f"Write \\{found[0]}, or quote the delimiter (<<'EOF')."
            yield Hit(file.name, _place(body, found), message, fix)


def _place(body: Heredoc, found: re.Match[str]) -> Position:
    """Where in the file it stands that was found in the text."""
    at = Lines(body.text).position(found.start())
    return Position(body.at.line + at.line - 1, at.column)


_SETS = re.compile(
    r"^[ \t]*(?:export[ \t]+|for[ \t]+(?=\w+[ \t]+in\b))?([A-Za-z_]\w*)(?:=|(?=[ \t]+in\b))", re.MULTILINE
)
_INHERITED = frozenset({
    "CUDA_HOME", "HF_HOME", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PWD", "PYTHONPATH", "SHELL",
    "TMPDIR", "USER", "VIRTUAL_ENV",
})  # fmt: skip
"""Variables that a shell has from the start."""
