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
