"""The batch that a training script draws for each pass: its size, and whether it is always the same."""

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


@rule(
    "script.fresh-iterator", severity="wrong", raised_by="nobody",
    evidence="torch 2.13, run; deepspeedai/DeepSpeed:deepspeed/runtime/pipe/engine.py train_batch 0.19.8, run",
)  # fmt: skip
def fresh_iterator(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A loader that begins anew in each step: the same first samples are trained on for ever."""
    for script in scripts(files):
        for call in script.called("iter"):
            name = call.node.args[0] if len(call.node.args) == 1 else None
            loop = _loop(call)
            if not isinstance(name, ast.Name) or loop is None or not _is_trained_on(script, call, loop):
                continue
            inside = [each for part in loop.body for each in ast.walk(part)]
            changes = any(isinstance(each, ast.Attribute) and each.attr == "set_epoch" for each in inside)
            rebound = any(_stores(each, name.id) for each in (*inside, *ast.walk(getattr(loop, "target", name))))
            if not changes and not rebound and _is_in_order(script, name):
                message = (
                    f"iter({name.id}) begins anew in each pass of the loop, and nothing changes the order: every "
                    "step trains on the first samples, and no other is ever seen."
                )
                fix = f"Make it once, before the loop; a pipeline takes iter(RepeatingLoader({name.id}))."
                yield script.hit(call, message, fix)


def _loop(call: Call) -> ast.For | ast.While | None:
    """The innermost loop around a call that is made in each of its passes; None where a condition is between."""
    child: ast.AST = call.node
    for node in call.around:
        if isinstance(node, ast.For | ast.While):
            return node if child in node.body else None
        if isinstance(node, ast.If | ast.IfExp | ast.Try | ast.FunctionDef | ast.Lambda | ast.comprehension):
            return None
        child = node
    return None


def _stores(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _is_trained_on(script: Script, call: Call, loop: ast.For | ast.While) -> bool:
    """Whether the loop's own passes train on what the iterator gives."""
    outer = call.around[0] if call.around else None
    trains = [
        each for each in script.every if _loop(each) is loop
        and (each.method == "backward" or (each.method == "train_batch" and each.owner in script.engines))
    ]  # fmt: skip
    if isinstance(outer, ast.Call) and script.name(outer.func) == "next":
        return any(each.method == "backward" for each in trains)
    name = ast.unparse(outer.targets[0]) if isinstance(outer, ast.Assign) else ""
    given = [each.argument("data_iter", 0) for each in trains if each.method == "train_batch"]
    return any(each is call.node or (isinstance(each, ast.Name) and each.id == name) for each in given)


def _is_in_order(script: Script, name: ast.Name) -> bool:
    """Whether a loader gives the same order each time: a sampler by ranks, or none and no shuffling."""
    made = script.bound(name)
    if not isinstance(made, ast.Call):
        return False
    loader = Call(made, script.name(made.func), ())
    if loader.name != LOADER or loader.unpacks or loader.keyword("batch_sampler") is not None:
        return False
    sampler = script.bound(loader.argument("sampler", 3))
    if isinstance(sampler, ast.Call):
        return script.name(sampler.func) == "torch.utils.data.DistributedSampler"
    shuffle, data = loader.argument("shuffle", 2), script.bound(loader.argument("dataset", 0))
    plain = sampler is None and (shuffle is None or script.constant(shuffle) is False)
    kind = script.name(data.func) if isinstance(data, ast.Call) else ""
    own = next((each for each in script.nodes if isinstance(each, ast.ClassDef) and each.name == kind), None)
    indexed = own is not None and any(getattr(each, "name", "") == "__getitem__" for each in own.body)
    return plain and (indexed or kind.startswith(_INDEXED))


_INDEXED = ("torch.utils.data.TensorDataset", "torchvision.datasets.")
"""Data sets that give the same sample for the same number."""


@rule("script.batch-zero", severity="error", raised_by="torch", evidence="torch 2.13, run")
def batch_zero(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A batch that is divided by more ranks than it has samples: a DataLoader takes none of 0."""
    for script in scripts(files):
        for call in script.called(LOADER):
            size = call.argument("batch_size", 1)
            drawn = value_of(files, script, size, call.around, settings.world_size)
            if type(drawn) is int and drawn < 1 and size is not None:
                message = f"batch_size is {ast.unparse(size)}, which is {drawn} here: ValueError."
                yield script.hit(call, message, "Give each rank a sample: a larger batch, or fewer ranks.")
