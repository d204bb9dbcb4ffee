"""The numbers that a loop, or SLURM's own, give to the nodes of a run: they count from 0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.files import loops
from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.loops import Passes
from dslaunch.files.position import Lines, Position
from dslaunch.files.script import Command, ShellScript
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_EVIDENCE = "torchrun 2.13 and accelerate 1.15.0, run; bash 5.2, run"
_RANK = ("--node_rank", "--node-rank", "--machine_rank", "--machine-rank")
_NODES = ("--nnodes", "--num_machines", "--num-machines")
_BACKEND = ("--rdzv_backend", "--rdzv-backend")
_ONE_MORE = re.compile(r"\$\(\(\s*\$?\{?SLURM_(?:NODEID|PROCID)\}?\s*\+\s*1\s*\)\)")
_REFERENCE = re.compile(r"\$\{?(\w+)\}?")
_SET = re.compile(r"(?:NODE|MACHINE|GROUP)_RANK=(.+)", re.DOTALL)
_NODES_SET = re.compile(r"(?:NNODES|NUM_NODES|NUM_MACHINES|NODES)=(\d{1,6})")
_LINE = re.compile(r"""\bsed\s+-n\s+["']?(\$\{\w+\}|\$\w+)["']?p""")
_HOST = re.compile(r"\$\{?\w+|\{\d+\.\.\d+\}")


@rule("launcher.node-numbers", severity="hang", raised_by="nobody", evidence=_EVIDENCE)
def node_numbers(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Nodes that a loop or an expression numbers past the last, or all alike: they count from 0."""
    for file, script in files.scripts():
        if file.inside:
            continue
        lines = file.places
        for launch in script.launches:
            for numbered in _numbered(launch):
                yield from _beyond(file, script, lines, numbered)
                yield from _all_alike(file, script, lines, launch, numbered)
        for command in script.commands:
            yield from _handed_on(file, script, lines, command)
        yield from _line_0(file, script, lines)


@dataclass(frozen=True)
class _Numbered:
    """A launcher that is told which node it is on."""

    launcher: Launcher
    option: str
    """As typed."""
    rank: str
    nodes: str


def _numbered(launch: CommandLine) -> Iterator[_Numbered]:
    """Those that go by the number: the static rendezvous does."""
    for launcher in launch.launchers:
        options = launcher.options
        flag, nodes = options.flag(*_RANK), options.value(*_NODES)
        if launcher.program not in ("torchrun", "accelerate") or flag is None or not flag.values or nodes is None:
            continue
        if (options.value(*_BACKEND) or "static") == "static" and not options.has("--config_file"):
            yield _Numbered(launcher, flag.name, flag.values[-1], nodes)


def _beyond(file: File, script: ShellScript, lines: Lines, numbered: _Numbered) -> Iterator[Hit]:
    """The last pass gives a number that no node has."""
    at = numbered.launcher.options.position(numbered.option)
    held = loops.filled(numbered.rank, script.passes, lines.offset(at))
    many = numbered.nodes
    fix = f"Count from 0: {numbered.option} 0 is the node at the master address."
    if _ONE_MORE.fullmatch(numbered.rank):
        message = f"{numbered.rank} numbers the nodes from 1: none is node 0, and the others wait for it."
        yield Hit(file.name, at, message, fix)
    elif held is not None and _reaches(held, many):
        last = f"${held.reaches}" if held.reaches else held.values[-1]
        message = f"the loop gives {numbered.option} {held.values[0]} to {last}, and {many} nodes count from 0"
        from_1 = held.values[0] == "1"
        lost = "none is node 0, and the others wait for it" if from_1 else "the last is none of them"
        yield Hit(file.name, at, f"{message}: {lost}.", fix)


def _reaches(held: Passes, nodes: str) -> bool:
    """Whether the last number is that of the nodes, or more."""
    if held.reaches:
        found = _REFERENCE.fullmatch(nodes)
        return found is not None and found[1] == held.reaches
    last = held.values[-1]
    return last.isdecimal() and nodes.isdecimal() and int(nodes) > 1 and int(last) >= int(nodes)


def _all_alike(
    file: File, script: ShellScript, lines: Lines, launch: CommandLine, numbered: _Numbered
) -> Iterator[Hit]:
    """A loop over hosts, or one command on all of them, that tells each the same number."""
    several = numbered.nodes.isdecimal() and int(numbered.nodes) > 1
    if not several or not numbered.rank.isdecimal():
        return
    command = next(each for each in script.commands if each.at == launch.at)
    at = numbered.launcher.options.position(numbered.option)
    host = _host(command)
    held = loops.filled(host[0], script.passes, lines.offset(host[1])) if host else None
    mpirun = launch.launcher("mpirun")
    copies = (mpirun.options.value("-np", "--np", "-n") or "1") if mpirun else "1"
    over_all = command.words[0].text in ("pdsh", "clush") or (copies.isdecimal() and int(copies) > 1)
    looped = held is not None and (len(held.values) > 1 or held.reaches)
    if looped or over_all:
        message = f"{numbered.option} {numbered.rank} is that of all {numbered.nodes} nodes: they never meet."
        yield Hit(file.name, at, message, "Give each its own number, counted from 0, or use --rdzv_backend c10d.")


def _host(command: Command) -> tuple[str, Position] | None:
    """The word behind ssh that names the host, where the shell fills it in."""
    if command.words[0].text != "ssh":
        return None
    names = (word for word in command.words[1:] if not word.text.startswith("-") and _HOST.search(word.text))
    first = next(names, None)
    return (first.text, first.at) if first else None


def _handed_on(file: File, script: ShellScript, lines: Lines, command: Command) -> Iterator[Hit]:
    """`ssh HOST NODE_RANK=$i NNODES=2 bash run.sh` in a loop."""
    words = [(word.text, word.at) for word in command.words]
    words += [(f"{each.name}={each.value}", each.at) for each in command.environment]
    nodes = next((found[1] for text, _ in words if (found := _NODES_SET.fullmatch(text))), None)
    nodes = nodes or next(
        (value for name in ("NNODES", "NUM_NODES") if (value := script.variable(name)) and is_told(value)), None
    )
    for text, at in words if nodes else ():
        found = _SET.fullmatch(text)
        held = loops.filled(found[1], script.passes, lines.offset(at)) if found else None
        if held is not None and nodes and _reaches(held, nodes):
            name = text.partition("=")[0]
            span = f"{held.values[0]} to {held.values[-1]}"
            message = f"the loop gives {name} {span}, and {nodes} nodes count from 0."
            yield Hit(file.name, at, message, f"Count from 0: {name}=0 is the node at the master address.")


def _line_0(file: File, script: ShellScript, lines: Lines) -> Iterator[Hit]:
    """`sed -n "${i}p" FILE` in a loop from 0."""
    for found in _LINE.finditer(file.text):
        held = loops.filled(found[1], script.passes, found.start(1))
        line = file.text[file.text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if held is not None and held.values[0] == "0" and not line.lstrip().startswith("#"):
            message = "the first pass asks sed for line 0, and lines count from 1: sed refuses it."
            fix = f"Write $(({held.name} + 1))p."
            yield Hit(file.name, lines.position(found.start()), message, fix, "error")
