"""A script that starts processes which import it again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts_guards import guards
from dslaunch.rules.scripts_tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")


@rule(
    "script.spawn-guard", severity="error", raised_by="python",
    evidence="torch 2.13, run; python/cpython:Lib/multiprocessing/spawn.py _check_not_importing_main 3.11, run",
)  # fmt: skip
def unguarded(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """mp.spawn at the top of a file without `if __name__ == "__main__"`: each process runs it again."""
    for script in scripts(files):
        if '"__main__"' in script.python.text or "'__main__'" in script.python.text:
            continue
        for call in script.called(*_SPAWNS):
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
