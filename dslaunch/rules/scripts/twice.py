"""A process group that is made where one exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.objects import beside
from dslaunch.rules.scripts.tree import ACCELERATOR, INIT, Call, Script, scripts
from dslaunch.rules.settings import Settings

_MAKERS = ("deepspeed.init_distributed", "deepspeed.initialize", *ACCELERATOR, INIT)
"""What makes the default group, as deepspeed.init_distributed alone does only where there is none."""


@rule(
    "script.group-twice", severity="error", raised_by="torch",
    evidence="pytorch/pytorch:torch/distributed/distributed_c10d.py init_process_group 2.13, run",
)  # fmt: skip
def twice(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """init_process_group behind what has made the default group already."""
    every = list(scripts(files))
    inits = (call for script in every for call in script.called(INIT))
    helpers = {call.function.name for call in inits if call.function is not None}
    for script in every:
        ends = script.methods("destroy_process_group")
        made = [(call, INIT) for call in script.called(INIT)] + _by_helpers(script, every, helpers)
        makers = [(call, "") for call in script.called(*_MAKERS)] + [each for each in made if each[1] != INIT]
        for call, how in made:
            before = [each for each in makers if _runs_before(each[0], call)]
            if before and _always(call) and not any(_runs_before(each, call) for each in ends):
                first, first_how = before[0]
                also = f" ({how})" if how != INIT else ""
                message = (
                    f"{first.method} in line {first.node.lineno}{f' ({first_how})' if first_how else ''} has made "
                    f"the group{', which this makes again' if also else ''}{also}: ValueError, trying to "
                    "initialize the default process group twice."
                )
                yield script.hit(call, message, "Take one of them out; init_process_group goes first.")


def _by_helpers(script: Script, every: list[Script], helpers: set[str]) -> list[tuple[Call, str]]:
    """Calls of functions, of the file or of one beside it, that always make the group, and where they do."""
    found: list[tuple[Call, str]] = []
    for call in script.methods(*helpers):
        own = call.name in script.functions
        of = [script] if own else beside(script, call.name, every) if call.name not in _MAKERS else []
        for other in of:
            function = other.functions.get(call.method)
            if function is None or _ASKS.search(ast.unparse(function)):
                continue
            inside = [each for each in other.calls_of.get(function, ()) if each.name == INIT and _always(each)]
            if inside and not _in_class(other, function):
                found.append((call, f"{other.path}:{inside[0].node.lineno}"))
    return found


_ASKS = re.compile(r"is_initialized|destroy_process_group|\breturn\b[\s\S]*init_process_group|\btry:")
"""What a function that makes the group where there is none, or not always, has in it."""


def _in_class(script: Script, function: ast.FunctionDef) -> bool:
    return function not in script.python.tree.body


def _runs_before(first: Call, second: Call) -> bool:
    """Whether a call stands above another in the same function, and always runs."""
    above = first.node.end_lineno or first.node.lineno
    return above < second.node.lineno and function_of(first) is function_of(second) and _always(first)


def _always(call: Call) -> bool:
    return all("__name__" in ast.unparse(node.test) for node, _ in guards(call))
