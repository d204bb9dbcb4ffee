"""The batch that a training script draws for each pass, against the one that its DeepSpeed JSON counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.batch import MICRO, STEPS, TRAIN
from dslaunch.rules.deepspeed.config import Config, one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.tree import LOADER, Call, Script, scripts
from dslaunch.rules.settings import Settings

_PARTS = frozenset({"chunk", "split", "tensor_split", "narrow"})
"""With these a script may cut what it draws into passes."""


@rule(
    "script.loader-batch", severity="wrong", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py step, global_samples 0.19.8, run",
)  # fmt: skip
def loader_batch(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A DataLoader that draws another number of samples for each pass than the DeepSpeed JSON counts."""
    config = one_config(plan, files, settings)
    micro = _micro(config) if config else None
    if micro is None:
        return
    for script in scripts(files):
        if len(script.deepspeed) != 1 or script.by_framework or script.methods(*_PARTS):
            continue
        for call in script.called(LOADER):
            drawn = value_of(files, script, call.argument("batch_size", 1), call.around)
            if type(drawn) is int and drawn > 0 and drawn != micro and _trains(script, call):
                counts = f"each pass draws {drawn} samples here, and {MICRO} is {micro:g}"
                message = f"{counts}: a step takes {drawn / micro:g} times the batch that DeepSpeed counts."
                yield script.hit(call, message, f"Write batch_size=engine.{MICRO}(), or the same number.")


def _micro(config: Config) -> float | None:
    """Samples of a pass on a rank, as they are written or follow from the other two numbers."""
    given = config.number(MICRO)
    if given:
        return given
    whole, steps = config.number(TRAIN), config.number(STEPS) or 1
    ranks = set(config.replicas)
    if whole and len(ranks) == 1 and whole % (steps * min(ranks)) == 0:
        return whole / (steps * min(ranks))
    return None


def _trains(script: Script, call: Call) -> bool:
    """Whether a loop over the loader's one name holds the engine's backward pass or step."""
    names = {name for name in script.bound_at if script.bound(ast.Name(name, ast.Load())) is call.node}
    passes = {f"{engine}.{method}" for engine in script.engines for method in ("backward", "step")}
    for node in script.nodes:
        if isinstance(node, ast.For) and any(
            isinstance(each, ast.Name) and each.id in names for each in ast.walk(node.iter)
        ):
            inside = (each for part in node.body for each in ast.walk(part) if isinstance(each, ast.Call))
            if any(ast.unparse(each.func) in passes for each in inside):
                return True
    return False
