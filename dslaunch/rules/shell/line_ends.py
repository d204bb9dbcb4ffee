"""What stands before and between the lines of a file: byte order marks, and line ends of DOS."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import START, Position
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import jobs

_MARK = "\ufeff"
_MARKED = {
    "shell": "the first line isn't the interpreter's: exec format error, or a command that isn't found",
    "env": "the first line is a command that isn't found where the file is sourced",
    "deepspeed_env": "it becomes part of the first name, which no rank then reads",
    "hostfile": "it becomes part of the first host's name",
}


@rule(
    "file.line-ends", severity="error", raised_by="nobody",
    evidence="bash 5.2, run; deepspeedai/DeepSpeed:deepspeed/launcher/runner.py 0.19.8, run",
)  # fmt: skip
def line_ends(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script with line ends of DOS, or a byte order mark: the shell takes them for letters."""
    batch = {job.file.name for job in jobs(files)}  # slurm.script-form
    for file in files.of("shell", "env", "deepspeed_env", "hostfile"):
        if file.inside:
            continue
        if file.text.startswith(_MARK):
            message = f"a byte order mark begins this file: {_MARKED[file.kind]}."
            yield Hit(file.name, START, message, "Save it as UTF-8 without a byte order mark.")
        lines = file.text.split("\n")
        first = next((number for number, line in enumerate(lines, 1) if line.endswith("\r")), 0)
        if first and file.kind in ("shell", "env") and file.name not in batch:
            message = "lines end as in DOS: bash takes the \\r for a letter of the last word"
            message += ", the interpreter's too." if first == 1 and lines[0].startswith("#!") else "."
            at = Position(first, len(lines[first - 1]))
            yield Hit(file.name, at, message, "Save the file with line feeds alone (dos2unix).")
