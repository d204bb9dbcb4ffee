"""Training scripts that count the steps of a schedule before or after accelerate has divided the data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import ACCELERATOR, Call, Script, scripts
from dslaunch.rules.settings import Settings

_SCHEDULES = re.compile(
    r"get_(?:\w+_)?schedul(?:er|e_with_\w+)|OneCycleLR|CosineAnnealingLR|LinearLR|PolynomialLR"
)
_OTHERWISE = ("split_batches", "step_scheduler_with_optimizer", "dataloader_config")
_ROUNDS = 3
"""Names between a loader's length and the schedule that are followed."""


@rule(
    "script.accelerate-steps", severity="wrong", raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/scheduler.py 1.15.0, run on two ranks",
)  # fmt: skip
def counted(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A schedule over the length of a prepared loader, which accelerate steps once for each process."""
    for script in scripts(files) if settings.world_size != 1 else ():
        made = script.called(*ACCELERATOR)
        if len(made) != 1 or made[0].unpacks or any(made[0].keyword(name) is not None for name in _OTHERWISE):
            continue
        prepares = [call for call in script.methods("prepare") if call.owner in script.accelerators]
        for call in script.calls if prepares and ".num_processes" not in script.python.text else ():
            if not _SCHEDULES.fullmatch(call.method):
                continue
            told = _over(script, call)
            lines = [
                (each.node.lineno, taken) for each in prepares
                for name, taken in told.items() if name in _returned(each)
            ]  # fmt: skip
            divided = any(made < taken for made, taken in lines)
            later = any(made > taken for made, taken in lines)
            prepared = any(_takes(script, each, call) for each in prepares)
            name = made[0].around[0] if made[0].around else None
            own = ast.unparse(name.targets[0]) if isinstance(name, ast.Assign) else "accelerator"
            if divided and prepared:
                message = (
                    f"over the length of a loader that {own}.prepare has divided, and {own} steps the schedule "
                    "once for each process: it ends after one N-th of the run."
                )
                yield script.hit(call, message, f"Count before prepare, or times {own}.num_processes.")
            elif later and not prepared and not divided:
                message = (
                    f"over the length of the whole loader, which {own}.prepare divides: the schedule, stepped by "
                    "the script alone, gets to one N-th of its way."
                )
                yield script.hit(call, message, f"Hand the schedule to {own}.prepare too.")


def _over(script: Script, call: Call) -> dict[str, int]:
    """The names whose length a schedule is told, over a few names of numbers, and the lines that take it."""
    parts = [*call.node.args, *(one.value for one in call.node.keywords)]
    found: dict[str, int] = {}
    for _ in range(_ROUNDS):
        nodes = [node for part in parts for node in ast.walk(part)]
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "len"
                and isinstance(node.args[0], ast.Name)
            ):
                found[node.args[0].id] = node.lineno
        bound = (script.bound(node) for node in nodes if isinstance(node, ast.Name))
        parts = [each for each in bound if each is not None and _is_number(each)]
    return found


def _is_number(node: ast.expr) -> bool:
    """Whether an expression only reckons: `math.ceil(len(loader) / steps)`."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else "len"
    return called.rpartition(".")[2] in ("ceil", "int", "max", "len")


def _returned(call: Call) -> set[str]:
    """The names that get what prepare returns."""
    around = call.around[0] if call.around else None
    nodes = ast.walk(around.targets[0]) if isinstance(around, ast.Assign) else ()
    return {each.id for each in nodes if isinstance(each, ast.Name)}


def _takes(script: Script, prepare: Call, schedule: Call) -> bool:
    """Whether prepare gets the schedule: there, or by the name it is bound to."""
    around = schedule.around[0] if schedule.around else None
    target = around.targets[0] if isinstance(around, ast.Assign) else None
    names = {target.id} if isinstance(target, ast.Name) else set()
    return any(
        each is schedule.node or (isinstance(each, ast.Name) and each.id in names)
        for given in prepare.node.args for each in ast.walk(given)
    )  # fmt: skip
