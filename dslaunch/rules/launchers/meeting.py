"""How the ranks of a script of one's own find each other: what mpirun and srun set, and what nobody does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_INIT = "torch.distributed.init_process_group"
_WANTED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_MOST = 20
"""Commands that are looked at."""
_LOCAL = re.compile(r"tcp://(?:localhost|127\.0\.0\.1|0\.0\.0\.0):")


def _started(files: FileSet, *programs: str) -> Iterator[tuple[File, CommandLine, Script]]:
    """Python files that one of these starts itself, with no torchrun or the like in between."""
    found = 0
    own = {script.path.rpartition("/")[2]: script for script in scripts(files)}
    for file, command in files.launches():
        names = [launcher.program for launcher in command.launchers]
        script = own.get(command.script.text.rpartition("/")[2]) if command.script else None
        if script is not None and names[0] in programs and names[-1] in (names[0], "python"):
            yield file, command, script
            found += 1
            if found == _MOST:
                return


@rule(
    "launcher.meeting", severity="error", raised_by="torch",
    evidence="torch/distributed/rendezvous.py _env_rendezvous_handler 2.13, run",
)  # fmt: skip
def meeting(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun or mpirun start a script whose ranks meet by the environment, and nobody sets it."""
    for file, command, script in _started(files, "srun", "mpirun"):
        call = _by_environment(script)
        if call is None:
            continue
        text = "\n".join(each.text for each in (file, *files.of("env", "shell")))
        told = text + script.python.text
        if re.search(r"mpi4py|mpi_discovery|import_module|runpy|torchrun|(?:^|\n)\s*(?:source|\.)\s", told):
            continue
        missing = [name for name in _WANTED if not re.search(rf"\b{name}\b", told)]
        if missing and not any(
            flag.name == "-x" and not flag.values for flag in command.launchers[0].options.flags
        ):
            program = command.launchers[0].program
            message = (
                f"{program} doesn't set {', '.join(missing)}, and nothing here does: ValueError in "
                f"{script.path.rpartition('/')[2]}, line {call.node.lineno}."
            )
            fix = "Set them from the launcher's own variables, or start torchrun once a node."
            sure = "RANK" in missing or any(each.directives for _, each in files.scripts())
            severity: Severity = "error" if sure else "info"  # the user's own environment may hold the rest
            yield Hit(file.name, command.at, message, fix, severity)


def _by_environment(script: Script) -> Call | None:
    """The call that meets by the environment, where the file shows how."""
    for call in script.called(_INIT):
        given = call.argument("init_method", 1)
        told = given is None or script.constant(given) == "env://" or _is_default(script, given)
        others = (call.keyword(name) for name in ("store", "rank", "world_size"))
        if told and not call.unpacks and all(each is None for each in others):
            return call
    return None


def _is_default(script: Script, given: ast.expr) -> bool:
    """Whether it is an argument of the command line that is env:// where nobody gives it."""
    return isinstance(given, ast.Attribute) and any(
        str(script.constant(call.node.args[0])).lstrip("-").replace("-", "_") == given.attr
        and script.constant(call.keyword("default")) == "env://"
        for call in script.methods("add_argument") if call.node.args
    )  # fmt: skip


@rule(
    "launcher.local-meeting", severity="hang", raised_by="nobody",
    evidence="PyTorch 2.13 documentation: torch.distributed, TCP initialization",
)  # fmt: skip
def local_meeting(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A script that meets at this node's own address, started on several."""
    for _, command, script in _started(files, "srun", "mpirun"):
        if not _several(files, command, settings):
            continue
        for call in script.called(_INIT):
            method = script.constant(call.argument("init_method", 1))
            if isinstance(method, str) and _LOCAL.match(method):
                message = (
                    f"{method} is each node itself: on several nodes the ranks wait for each other for ever."
                )
                yield script.hit(call, message, "Use the first node's name, or env:// with MASTER_ADDR.")


def _several(files: FileSet, command: CommandLine, settings: Settings) -> bool:
    nodes = command.launchers[0].options.value("--nodes", "-N")
    for _, script in files.scripts():
        directive = script.directive("--nodes", "-N")
        nodes = nodes or (directive.value if directive else None)
    count = int(nodes) if nodes and nodes.isdecimal() else settings.nodes
    return count is not None and count > 1


@rule(
    "script.spawn-under-launcher", severity="hang", raised_by="nobody",
    evidence="torch 2.13 and DeepSpeed 0.19.8, run",
)  # fmt: skip
def spawned(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script that starts its own processes, started on every rank by a launcher."""
    for file, command in islice(files.launches(), _MOST):
        launcher = command.launcher("torchrun") or command.launcher("deepspeed")
        name = command.script.text.rpartition("/")[2] if command.script else ""
        for script in scripts(files) if launcher else ():
            if script.path.rpartition("/")[2] != name or not name:
                continue
            for call in script.called("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")[:1]:
                count = call.argument("nprocs", 2)
                if count is not None and not (isinstance(count, ast.Constant) and count.value == 1):
                    place = f"{file.name.rpartition('/')[2]}, line {command.at.line}"
                    program, more = command.launchers[-1].program, ast.unparse(count)
                    message = (
                        f"{program} in {place}, starts this, and each starts {more} more: they never meet."
                    )
                    yield script.hit(
                        call, message, "Start it with plain python, or call the function without spawn."
                    )
