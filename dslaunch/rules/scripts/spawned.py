"""Training scripts that start their ranks themselves: where these meet, and what they import again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import INIT, SPAWNS, Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_OUTER = re.compile(
    r"[\"'](?:PMI_(?:RANK|SIZE)|PMIX_RANK|OMPI_COMM_WORLD_(?:RANK|SIZE)|SLURM_(?:PROCID|NTASKS))[\"']"
)
"""Ranks of a launcher around the script, which may give the address too."""


@rule(
    "script.spawn-address", severity="error", raised_by="torch",
    evidence="torch 2.13, run: torch/distributed/rendezvous.py",
)  # fmt: skip
def address(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Ranks that a script spawns, and that nothing tells where to meet."""
    given = {each.name for file in files.files for each in file.assignments}
    if next(files.launches(), None) is not None and not given.isdisjoint(_MEETING):
        return
    for script in scripts(files):
        if _OUTER.search(script.python.text):
            continue
        missing = [name for name in _MEETING if name not in script.python.text and name not in given]
        workers = _workers(script) if missing else set()
        for call in script.called(INIT) if workers and not _under_launcher(files, script) else ():
            if not _by_environment(script, call) or getattr(function_of(call), "name", "") not in workers:
                continue
            message = (
                f"the ranks meet by the environment, and nothing sets {' or '.join(missing)} before they are "
                "spawned: ValueError."
            )
            fix = 'Set both in os.environ before, or give init_method="tcp://127.0.0.1:29500".'
            yield script.hit(call, message, fix)


def _by_environment(script: Script, call: Call) -> bool:
    """Whether the ranks look into their environment for where to meet."""
    method, store = call.argument("init_method", 1), call.keyword("store")
    told = method is None or is_none(method) or script.constant(method) == "env://"
    return told and (store is None or is_none(store)) and not call.unpacks


def _under_launcher(files: FileSet, script: Script) -> bool:
    """Whether a launcher that sets the variables starts the script."""
    return any(
        command.launchers[-1].program != "python" for _, command, started in launched(files) if started is script
    )


def _workers(script: Script) -> set[str]:
    """Functions of the file that run in spawned processes; empty where any comes from elsewhere."""
    found: set[str] = set()
    for call in script.called(*SPAWNS, *_PROCESSES):
        first = call.argument("fn", 0) if call.name in SPAWNS else call.keyword("target")
        if isinstance(first, ast.Name) and first.id in script.functions:
            found.add(first.id)
    while more := {name for each in found for name in _called(script, each)} - found:
        found |= more
    return found


def _called(script: Script, function: str) -> Iterator[str]:
    for node in ast.walk(script.functions[function]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in script.functions:
            yield node.func.id


@rule(
    "script.spawn-guard", severity="error", raised_by="python",
    evidence="torch 2.13, run; python/cpython:Lib/multiprocessing/spawn.py _check_not_importing_main 3.11, run",
)  # fmt: skip
def unguarded(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """mp.spawn at the top of a file without `if __name__ == "__main__"`: each process runs it again."""
    for script in scripts(files):
        if '"__main__"' in script.python.text or "'__main__'" in script.python.text:
            continue
        for call in script.called(*SPAWNS):
            if script.constant(call.keyword("start_method")) not in (None, "spawn"):
                continue
            if _at_the_top(call) or _called_at_the_top(script, call):
                message = (
                    "each process imports this file, and spawns again: RuntimeError, before the current process "
                    "has finished its bootstrapping phase."
                )
                yield script.hit(call, message, 'Put it below if __name__ == "__main__":.')


def _at_the_top(call: Call) -> bool:
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return not any(isinstance(node, inside) for node in call.around) and not list(guards(call))


def _called_at_the_top(script: Script, call: Call) -> bool:
    """Whether the function around is called as the file is read."""
    function = next((node for node in call.around if isinstance(node, ast.FunctionDef)), None)
    if function is None or list(guards(call)):
        return False
    return any(_at_the_top(each) for each in script.called(function.name))
