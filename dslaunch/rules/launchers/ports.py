"""Ports that a script computes from a job's number or by chance: where they may be none."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dslaunch.files.fileset import FileSet
from dslaunch.files.script import ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_LAST = 65535
_MAX_JOB = 67_043_328
"""Slurm's MaxJobId, where a site doesn't set another."""
_RANGES: Mapping[str, tuple[int, int]] = {
    "SLURM_JOB_ID": (1, _MAX_JOB), "SLURM_JOBID": (1, _MAX_JOB), "SLURM_ARRAY_JOB_ID": (1, _MAX_JOB),
    "SLURM_ARRAY_TASK_ID": (0, 100), "RANDOM": (0, 32767), "PPID": (1, 32767), "_pid": (1, 32767),
}  # fmt: skip
"""What bash and SLURM put into these, at least: arrays may be longer, and processes count on to 4194304."""
_PORT = re.compile(
    r"""(?:\b\w*PORT=|\b\w*port=|--\w+[-_]port[=\s]+|endpoint[=\s]+\S*?:)["']?
        (?:\$\(\((?P<shell>[^\n]*?)\)\)|(?:\$\(|`)\s*expr\s(?P<expr>[^\n]*?)[)`](?=["'\s;]|$))""",
    re.VERBOSE,
)
_TAIL = re.compile(
    r"(?:\$\(|`)\s*(?:echo|printf)\s+(?:-n\s+)?[\"']?\$\{?\w+\}?[\"']?\s*\|\s*tail\s+-c\s*(\d)\s*[)`]"
)
_LAST_DIGITS = re.compile(r"(\d*)\$\{\w+:\s*\(?-(\d)\)?(?::\d)?\}")
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


@dataclass(frozen=True)
class _Span:
    """All that a number may be, and what makes it so."""

    least: int
    most: int


@rule(
    "env.port-range", severity="error", raised_by="torch",
    evidence="torch 2.13, run; bash 5.2, run; the manual page of slurm.conf 22.05, MaxJobId",
)  # fmt: skip
def port_range(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A port computed from a job's number, or by chance, that may be above 65535."""
    for file, script in files.scripts():
        lines = file.places
        for found in _PORT.finditer(file.text):
            text = found["shell"] or found["expr"] or ""
            start = found.start("shell") if found["shell"] else found.start("expr")
            span = _span(text, script)
            comment = file.text[file.text.rfind("\n", 0, start) + 1 : start].lstrip().startswith("#")
            if span is None or comment or span.most <= _LAST:
                continue
            shown = " ".join(text.split())
            message = f"{shown} is {span.least} to {span.most}, and no port is above {_LAST}: such a job dies."
            fix = "Keep it below: $((20000 + SLURM_JOB_ID % 20000)), or RANDOM % 20000."
            yield Hit(file.name, lines.position(start), message, fix)


def _span(text: str, script: ShellScript) -> _Span | None:
    """The numbers an expression of the shell may give; None where one part of it isn't told."""
    text = _TAIL.sub(lambda found: f" _digits({found[1]}) ", text)
    text = _LAST_DIGITS.sub(lambda found: f" _digits({found[2]}, {found[1] or 0}) ", text)
    text = _NAME.sub(r" \1 ", text.replace("$$", " _pid ")).replace("\\*", "*")
    try:
        return _of(ast.parse(text.strip(), mode="eval").body, script)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


_SHIFTS: Mapping[type[ast.operator], Callable[[_Span, _Span], _Span]] = {
    ast.Add: lambda a, b: _Span(a.least + b.least, a.most + b.most),
    ast.Sub: lambda a, b: _Span(a.least - b.most, a.most - b.least),
    ast.Mult: lambda a, b: _Span(a.least * b.least, a.most * b.most),
    ast.Div: lambda a, b: _Span(a.least // b.most, a.most // b.least),
    ast.Mod: lambda a, b: a if a.most < b.least else _Span(0, b.most - 1),
}


def _of(node: ast.expr, script: ShellScript) -> _Span:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _Span(node.value, node.value)
    if isinstance(node, ast.Name):
        told = script.variable(node.id)
        if told is not None and told.isdecimal():
            return _Span(int(told), int(told))
        if node.id in _RANGES and told is None:
            return _Span(*_RANGES[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _SHIFTS:
        one, other = _of(node.left, script), _of(node.right, script)
        if one.least >= 0 and other.least >= 0:
            return _SHIFTS[type(node.op)](one, other)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_digits":
        count, before = (*(ast.literal_eval(each) for each in node.args), 0)[:2]
        return _Span(before * 10**count, (before + 1) * 10**count - 1)
    raise ValueError(ast.dump(node))
