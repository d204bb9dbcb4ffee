"""DeepSpeed's pipelines in a training script, against the ranks and the DeepSpeed JSON."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.tree import Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_AXES = ("num_pp", "num_mp", "num_dp")
_MODULES = ("PipelineModule", "DualPipeVModule")


@rule(
    "script.pipeline-mpu", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/__init__.py initialize 0.19.8, run",
)  # fmt: skip
def pipeline_mpu(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An mpu beside a PipelineModule, which has one of its own."""
    for script in scripts(files):
        for call in script.deepspeed:
            made = script.bound(call.argument("model", 1))
            mpu = call.argument("mpu", 7)
            built = isinstance(made, ast.Call) and script.name(made.func).rpartition(".")[2] in _MODULES
            if built and mpu is not None and not is_none(mpu):
                yield script.hit(call, "mpu with a PipelineModule: AssertionError.", "Drop mpu=.")


@rule(
    "script.pipeline-module", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/module.py, pipe/topology.py 0.19.8, run",
)  # fmt: skip
def pipeline_module(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A PipelineModule that is cut in a way DeepSpeed doesn't know, or over other ranks than there are."""
    for script in scripts(files):
        for call in script.methods(*_MODULES):
            method = script.constant(call.keyword("partition_method"))
            if isinstance(method, str) and not _is_partition(method):
                message = f"partition_method {method!r}: NotImplementedError."
                yield script.hit(call, message, "Write uniform, parameters, or type:REGEX.")
            stages = value_of(files, script, call.argument("num_stages", 1), call.around)
            world = settings.world_size
            if type(stages) is int and world is not None and stages > 0 and world % stages:
                message = f"num_stages {stages} doesn't divide {world} ranks: RuntimeError."
                yield script.hit(call, message, f"Use a number of stages that divides {world}.")
        for call in script.methods("PipeModelDataParallelTopology"):
            given = (call.argument(name, at) for at, name in enumerate(_AXES))
            sizes = [value_of(files, script, each, call.around) for each in given]
            if settings.world_size is not None and all(type(size) is int for size in sizes):
                product = sizes[0] * sizes[1] * sizes[2]
                if product != settings.world_size:
                    message = f"a topology of {product} ranks for {settings.world_size}: AssertionError."
                    yield script.hit(call, message, "Choose num_pp * num_mp * num_dp as the number of ranks.")


def _is_partition(method: str) -> bool:
    return method.lower() in ("uniform", "parameters") or method.lower().startswith("type:")


@rule(
    "pipeline.empty-stage", severity="error", raised_by="torch",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/module.py _partition_layers 0.19.8, run",
)  # fmt: skip
def empty_stage(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More pipeline stages than layers: the ranks of an empty stage have nothing to train."""
    for script in scripts(files):
        for call in script.methods(*_MODULES):
            stages, layers = stages_of(script, call), _layers(script, call.argument("layers", 0))
            parts = 2 * stages if stages and call.method == "DualPipeVModule" else stages
            if parts and layers is not None and layers < parts:
                message = (
                    f"{layers} layers for {parts} parts: an empty one has no parameters, and its optimizer raises "
                    "ValueError while the other ranks wait."
                )
                yield script.hit(call, message, f"Use at most {layers} parts, or cut the layers finer.")


def stages_of(script: Script, call: Call) -> int | None:
    """The pipeline ranks of a module, by its number of stages or its topology."""
    given = script.constant(call.argument("num_stages", 1))
    topology = script.bound(call.argument("topology", 2))
    if given is None and isinstance(topology, ast.Call):
        given = script.constant(Call(topology, script.name(topology.func), ()).argument("num_pp", 0))
    return given if type(given) is int and given > 0 else None


def _layers(script: Script, node: ast.expr | None) -> int | None:
    """How many layers an expression lists, where that is written out."""
    given = script.bound(node)
    if isinstance(given, ast.List | ast.Tuple):
        return None if any(isinstance(each, ast.Starred) for each in given.elts) else len(given.elts)
    if isinstance(given, ast.ListComp) and len(given.generators) == 1 and not given.generators[0].ifs:
        over = given.generators[0].iter
        if isinstance(over, ast.Call) and script.name(over.func) == "range" and len(over.args) == 1:
            count = script.constant(over.args[0])
            return count if type(count) is int else None
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add):
        left, right = _layers(script, given.left), _layers(script, given.right)
        return left + right if left is not None and right is not None else None
    return None


@rule(
    "pipeline.dualpipev", severity="error", raised_by="deepspeed.initialize", since="0.19.8",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/dualpipev.py DualPipeVEngine.__init__ 0.19.8, run",
)  # fmt: skip
def dualpipev(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """DualPipeV with too few micro-batches, or with shapes that change."""
    config = one_config(plan, files, settings)
    for script in scripts(files):
        for call in script.methods("DualPipeVModule"):
            if script.constant(call.argument("dynamic_shape", 11)) is True:
                message = "dynamic_shape with DualPipeV, which exchanges shapes once: AssertionError."
                yield script.hit(call, message, "Pad the batches to one shape, and drop dynamic_shape.")
            stages = stages_of(script, call)
            steps = config.number("gradient_accumulation_steps") if config is not None else None
            if stages and steps is not None and steps < 2 * stages:
                message = f"{steps:g} accumulation steps for {stages} stages: AssertionError, twice is needed."
                yield script.hit(call, message, f"Set gradient_accumulation_steps to {2 * stages} or more.")


@rule(
    "script.pipeline-layer", severity="error", raised_by="deepspeed",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/module.py LayerSpec, forward 0.19.8, run",
)  # fmt: skip
def pipeline_layer(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A layer of a pipeline that takes several arguments, or a LayerSpec of what is no class."""
    for script in scripts(files):
        classes = {node.name: node for node in script.nodes if isinstance(node, ast.ClassDef)}
        yield from _losses(script)
        for call, made, by_spec in _layers_made(script):
            if by_spec and (isinstance(made, ast.Lambda) or script.name(made) in script.functions):
                what = "a lambda" if isinstance(made, ast.Lambda) else f"{ast.unparse(made)}, a function"
                message = f"LayerSpec of {what}: TypeError, issubclass() arg 1 must be a class."
                yield script.hit(call, message, "Put a function into the list of layers as it is.")
                continue
            inner = script.name(made.func) if by_spec and isinstance(made, ast.Call) else ""
            if inner in classes or (inner.startswith("torch.nn.") and inner.rpartition(".")[2][:1].isupper()):
                shown = inner.rpartition(".")[2]
                message = f"LayerSpec of an object, {shown}(...): TypeError, issubclass() arg 1 must be a class."
                yield script.hit(call, message, f"Write {call.method}(..., {shown}, ...).")
                continue
            name = script.name(made)
            needs = _needed(classes[name]) if name in classes else _OF_TORCH.get(name, ())
            if len(needs) > 1:
                message = (
                    f"{name.rpartition('.')[2]}.forward takes {', '.join(needs)}, and a pipeline hands one object "
                    f"from layer to layer: TypeError, {len(needs) - 1} missing."
                )
                fix = f"Write forward(self, inputs) and unpack the tuple there: {', '.join(needs)} = inputs."
                yield script.hit(call, message, fix)


def _losses(script: Script) -> Iterator[Hit]:
    """A class of torch's in the place of the loss: the engine calls it with outputs and labels."""
    for call in script.methods(*_MODULES):
        given = call.keyword("loss_fn")
        name = script.name(given) if given is not None else ""
        if name.startswith("torch.nn.") and name.endswith("Loss"):
            short = name.rpartition(".")[2]
            message = f"loss_fn is the class {short}, which is called with outputs and labels: RuntimeError."
            yield script.hit(call, message, f"Write loss_fn=torch.nn.{short}().")


_OF_TORCH = {
    "torch.nn.TransformerDecoderLayer": ("tgt", "memory"), "torch.nn.TransformerDecoder": ("tgt", "memory"),
    "torch.nn.MultiheadAttention": ("query", "key", "value"), "torch.nn.Transformer": ("src", "tgt"),
    "torch.nn.Bilinear": ("input1", "input2"),
}  # fmt: skip
"""Layers of torch whose forward takes several arguments, and what it can't do without."""


def _layers_made(script: Script) -> Iterator[tuple[Call, ast.expr, bool]]:
    """Each layer of a pipeline: where it is made, its class, and whether by a LayerSpec."""
    for call in script.methods("LayerSpec", "TiedLayerSpec"):
        place = 1 if call.method == "TiedLayerSpec" else 0
        made = call.argument("typename", place)
        if made is not None and call.name.startswith("deepspeed.") and call.keyword("forward_fn") is None:
            yield call, made, True
    for call in script.methods(*_MODULES):
        for each in _listed(script, call.argument("layers", 0)):
            if isinstance(each, ast.Call):
                yield Call(each, script.name(each.func), ()), each.func, False


def _listed(script: Script, node: ast.expr | None) -> Iterator[ast.expr]:
    """What a list that is written out holds, also where a function of the file returns it."""
    given = script.bound(node)
    function = script.functions.get(script.name(given.func)) if isinstance(given, ast.Call) else None
    ends = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)] if function else []
    if len(ends) == 1 and not _calls(ends[0], function):
        given = script.bound(ends[0])
        node = ends[0]
    for call in script.methods("append") if isinstance(node, ast.Name) else ():
        if call.owner == ast.unparse(node or call.node) and call.node.args:
            yield call.node.args[0]
    if isinstance(given, ast.List | ast.Tuple):
        for each in given.elts:
            yield from _listed(script, each.value) if isinstance(each, ast.Starred) else (each,)
    elif isinstance(given, ast.ListComp | ast.GeneratorExp):
        yield given.elt
    elif isinstance(given, ast.BinOp):
        yield from _listed(script, given.left)
        yield from _listed(script, given.right)


def _calls(node: ast.expr | None, function: ast.FunctionDef | None) -> bool:
    """Whether a function's end calls the function itself."""
    calls = (each for each in ast.walk(node or ast.Constant(None)) if isinstance(each, ast.Call))
    return function is not None and any(ast.unparse(each.func) == function.name for each in calls)


def _needed(made: ast.ClassDef) -> tuple[str, ...]:
    """The arguments that a class's own forward can't do without; empty where it takes any number."""
    functions = (each for each in made.body if isinstance(each, ast.FunctionDef))
    forward = next((each for each in functions if each.name == "forward"), None)
    if forward is None or forward.args.vararg is not None or forward.decorator_list:
        return ()
    given = [each.arg for each in (*forward.args.posonlyargs, *forward.args.args)][1:]
    return tuple(given[: len(given) - len(forward.args.defaults)])
