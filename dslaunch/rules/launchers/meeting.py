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
    "launcher.no-ranks", severity="error", raised_by="python",
    evidence="torch/distributed/rendezvous.py _env_rendezvous_handler 2.13, CPython 3.11, run",
)  # fmt: skip
def no_ranks(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Plain python starts a script that asks the environment for its rank, and nobody sets it."""
    for file, command, script in _started(files, "python"):
        if file.kind != "shell" or _may_be_set(files, file, command, script):
            continue
        place = script.path.rpartition("/")[2]
        sure = _run_in_any_case(script)
        read = _read(script, sure)
        meets = _by_environment(script)
        call = meets if meets is not None and id(meets.node) in sure else None
        if read is not None:
            name, node = read
            message = f"plain python sets no {name}: KeyError in {place}, line {node.lineno}."
        elif call is not None:
            message = f"plain python sets no RANK: ValueError in {place}, line {call.node.lineno}."
        else:
            continue
        fix = "Start it with torchrun --nproc-per-node N, or deepspeed."
        yield Hit(file.name, command.at, message, fix)


_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETS = re.compile(
    r"setdefault|putenv|os\.environ\.update|environ\[[^]]+\]\s*=[^=]|mpi_discovery|mpi4py|idr_torch|spawn|start_processes|"
    r"load_dotenv|not in os\.environ|in os\.environ|is_initialized|getenv|environ\.get|SLURM_|OMPI_|PMI_"
)
"""What gives a script variables, or lets it do without them."""


def _may_be_set(files: FileSet, file: File, command: CommandLine, script: Script) -> bool:
    """Whether something in the files sets a rank's variables, or starts the shell script on ranks itself."""
    set_here = {each.name for each in (*command.environment, *file.assignments)} & set(_OF_RANKS)
    shells = "\n".join(each.text for each in files.of("shell", "env", "kubernetes", "compose") if each is not file)
    stem = file.name.rpartition("/")[2]
    sourced = re.search(r"(?:^|\n|;|&&)\s*(?:source|\.)\s", file.text)
    by_others = stem in shells or "SLURM_" in file.text or "OMPI_" in file.text
    others = any(re.search(rf"\b(?:{'|'.join(_OF_RANKS)})\b", text) for text in (file.text, shells))
    return bool(set_here or sourced or by_others or others or _SETS.search(script.python.text))


def _read(script: Script, sure: set[int]) -> tuple[str, ast.Subscript] | None:
    """The first variable of a rank that `os.environ[...]` asks for as the script starts."""
    for node in script.nodes:
        if isinstance(node, ast.Subscript) and id(node) in sure and script.name(node.value) == "os.environ":
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if key in _OF_RANKS and isinstance(node.ctx, ast.Load):
                return str(key), node
    return None


_ELSEWHERE = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.Try, ast.While)


def _run_in_any_case(script: Script) -> set[int]:
    """The nodes that no condition and no `try` stands around, from the top of the file through the calls there."""
    found: set[int] = set()
    waiting: list[ast.AST] = list(script.python.tree.body)
    while waiting:
        node = waiting.pop()
        if id(node) in found or isinstance(node, _ELSEWHERE):
            continue
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.BoolOp):
            is_main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
            waiting += node.body if is_main and isinstance(node, ast.If) else []
            continue
        found.add(id(node))
        waiting += ast.iter_child_nodes(node)
        called = script.functions.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        waiting += called.body if called is not None else []
    return found


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
