"""What a pipeline engine is handed its batches by."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.tree import LOADER, Script, scripts
from dslaunch.rules.settings import Settings

_TAKE = ("train_batch", "eval_batch", "set_dataiterator")


@rule(
    "script.pipeline-iterator", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/engine.py _next_batch 0.19.8, run",
)  # fmt: skip
def pipeline_iterator(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A loader or list in the place of the iterator that a pipeline engine takes its batches from."""
    for script in scripts(files):
        for call in script.methods(*_TAKE) if script.deepspeed else ():
            name = "iterator" if call.method == "set_dataiterator" else "data_iter"
            given = call.argument(name, 0)
            made = possible(script, given, call.around) if given is not None else []
            none = bool(made) and all(_is_no_iterator(script, each) for each in made)
            if call.owner not in script.engines or not none:
                continue
            what = "a list" if isinstance(made[0], ast.List | ast.ListComp) else "a DataLoader"
            message = f"{call.method} takes the next batch of an iterator, and {what} is none: TypeError."
            fix = "Hand deepspeed.utils.RepeatingLoader(loader) over, made once above the loop."
            yield script.hit(call, message, fix)


def _is_no_iterator(script: Script, made: ast.expr) -> bool:
    return isinstance(made, ast.List | ast.ListComp) or (
        isinstance(made, ast.Call) and script.name(made.func) == LOADER
    )
