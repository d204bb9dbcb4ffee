"""A process group that is made where one exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import function_of, guards
from dslaunch.rules.scripts.tree import ACCELERATOR, INIT, Call, scripts
from dslaunch.rules.settings import Settings

_MAKERS = ("deepspeed.init_distributed", "deepspeed.initialize", *ACCELERATOR, INIT)
"""What makes the default group, as deepspeed.init_distributed alone does only where there is none."""


@rule(
    "script.group-twice", severity="error", raised_by="torch",
    evidence="pytorch/pytorch:torch/distributed/distributed_c10d.py init_process_group 2.13, run",
)  # fmt: skip
def twice(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """init_process_group behind what has made the default group already."""
    for script in scripts(files):
        ends = script.methods("destroy_process_group")
        for call in script.called(INIT):
            before = [each for each in script.called(*_MAKERS) if _runs_before(each, call)]
            if before and _always(call) and not any(_runs_before(each, call) for each in ends):
                first = before[0]
                message = (
                    f"{first.method} in line {first.node.lineno} has made the group: ValueError, trying to "
                    "initialize the default process group twice."
                )
                yield script.hit(call, message, "Take one of them out; init_process_group goes first.")


def _runs_before(first: Call, second: Call) -> bool:
    """Whether a call stands above another in the same function, and always runs."""
    above = first.node.end_lineno or first.node.lineno
    return above < second.node.lineno and function_of(first) is function_of(second) and _always(first)


def _always(call: Call) -> bool:
    return all("__name__" in ast.unparse(node.test) for node, _ in guards(call))
