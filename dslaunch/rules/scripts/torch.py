"""Training scripts with a loop of their own: data, devices, collectives and files across ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.branches import others_may_join
from dslaunch.rules.scripts.guards import (
    COLLECTIVES,
    OF_ACCELERATE,
    OF_CHECKPOINTS,
    function_of,
    guards,
    of_a_group,
    on_one_rank,
    one_rank_guard,
)
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.prefixes import handed, loaded_before, of_resumes
from dslaunch.rules.scripts.tree import DDP, FSDP, INIT, Call, Script, scripts
from dslaunch.rules.settings import Settings

_DOCS = "PyTorch 2.13 documentation"
_OF_MESHES = ("init_device_mesh", "DeviceMesh", "fully_shard")
"""What makes a DeviceMesh, which sets the device by LOCAL_RANK where none is set."""
_LOOKED_AT = 200
"""Statements of a function that may end it early."""
_OF_ENGINES = frozenset({
    "save_checkpoint", "load_checkpoint", "save_16bit_model", "train_batch", "eval_batch", "backward", "step",
})  # fmt: skip
_OF_SHARDS = frozenset({"save_state", "load_state", "get_state_dict"})
"""What accelerate does on all ranks where each has a part of the model."""


@rule("script.data-parallel", severity="slow", raised_by="nobody", evidence=f"{_DOCS}: DataParallel")
def data_parallel(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch.nn.DataParallel: one process drives all GPUs, and one node is all it reaches."""
    for script in scripts(files):
        if not script.called(DDP) and not script.deepspeed and not script.by_framework:
            for call in script.called("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
                message = (
                    "DataParallel copies the model to every GPU at each step, from one process on one node."
                )
                yield script.hit(call, message, "Use DistributedDataParallel under torchrun.")


@rule("script.device", severity="memory", raised_by="nobody", evidence=f"{_DOCS}: torch.cuda.set_device")
def device(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A bare "cuda" and no set_device: all processes of a node use GPU 0."""
    for script in scripts(files):
        chosen = script.methods("set_device", "set_device_index", *_OF_MESHES)
        chosen = chosen or script.called("torch.cuda.device")
        if not script.own_loop or chosen or "CUDA_VISIBLE_DEVICES" in script.python.text:
            continue
        if not script.called(INIT) or script.deepspeed or script.called("deepspeed.init_distributed"):
            continue  # what starts the process group elsewhere may choose the device there
        bare = [call for call in script.every if _is_bare(script, call)]
        if bare:
            message = 'a bare "cuda" is GPU 0 in every process, and nothing here calls torch.cuda.set_device.'
            fix = 'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first.'
            yield script.hit(bare[0], message, fix)


_GIVEN = re.compile(r"CUDA_VISIBLE_DEVICES|ray\.remote")
"""What gives each process GPUs of its own."""


@rule("script.first-device", severity="memory", raised_by="nobody", evidence=f"{_DOCS}: torch.device")
def first_device(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """GPU 0 by its number, in every process of a node."""
    for script in scripts(files):
        if not (script.own_loop or script.deepspeed) or _GIVEN.search(script.python.text):
            continue
        for call in script.calls:
            named = any(isinstance(each, ast.Constant) and each.value == "cuda:0" for each in call.node.args)
            others = (each for node, first in guards(call) for each in (node.orelse if first else node.body))
            chosen = any("accelerator.device" in ast.unparse(each) for each in others)
            if call.method in ("to", "device") and named and one_rank_guard(call) is None and not chosen:
                message = (
                    '"cuda:0" is the same GPU in each process of a node: its memory holds all of theirs.'
                )
                fix = 'Use cuda:LOCAL_RANK, or torch.cuda.set_device(LOCAL_RANK) and "cuda".'
                yield script.hit(call, message, fix)


@rule("script.device-rank", severity="error", raised_by="torch", evidence=f"{_DOCS}: torch.cuda.set_device")
def device_rank(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """The rank among all taken for the number of a GPU: from the second node on there is none."""
    for script in scripts(files) if settings.nodes != 1 else ():
        for call in script.called("torch.cuda.set_device"):
            if _is_global_rank(script, call.node.args[0] if call.node.args else None):
                message = (
                    "a rank among all as the number of a GPU: invalid device ordinal on the second node."
                )
                severity: Severity = "error" if settings.nodes else "info"
                found = script.hit(call, message, 'Use int(os.environ["LOCAL_RANK"]).')
                yield replace(found, severity=severity)


_AMONG_ALL = frozenset({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
"""Variables of launchers that count the processes of all nodes."""


def _is_global_rank(script: Script, given: ast.expr | None) -> bool:
    """int(os.environ["RANK"]) or get_rank(), as they stand or by a name of their own."""
    node = script.bound(given)
    if isinstance(node, ast.Call) and script.name(node.func) == "int" and node.args:
        node = node.args[0]
    if isinstance(node, ast.Call) and script.name(node.func) in ("os.getenv", "os.environ.get"):
        return script.constant(node.args[0] if node.args else None) in _AMONG_ALL
    if isinstance(node, ast.Call):
        return script.name(node.func) == "torch.distributed.get_rank"
    if isinstance(node, ast.Subscript) and script.name(node.value) == "os.environ":
        return script.constant(node.slice) in _AMONG_ALL
    return False


def _is_bare(script: Script, call: Call) -> bool:
    if call.method == "cuda":
        return not call.node.args and not call.node.keywords
    named = bool(call.node.args) and script.constant(call.node.args[0]) == "cuda"
    numbered = call.name == "torch.device" and call.argument("index", 1) is not None
    return call.method in ("to", "device") and named and not numbered


@rule(
    "script.collective-under-rank", severity="hang", raised_by="nobody", evidence=f"{_DOCS}; DeepSpeed#6836"
)
def collective(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A collective that one rank calls and the others don't, or the reverse: they wait for ever."""
    sharded = is_sharded(plan, files, settings)
    for script in scripts(files):
        calls = [call for call in script.calls if _is_collective(script, call, sharded=sharded)]
        reached = {(call.method, function_of(call), _reached_by(call)) for call in calls}
        for call in calls:
            told = _reached_by(call)
            if told is None or of_a_group(call) or others_may_join(script, call):
                continue
            if (call.method, function_of(call), not told) not in reached:
                message = f"{call.method} needs every rank, and only some get here: the others wait for ever."
                yield script.hit(call, message, "Call it on all ranks, outside of the condition.")


def _reached_by(call: Call) -> bool | None:
    """Which ranks reach a call, as in `one_rank_guard`."""
    told = one_rank_guard(call)
    return _after_return(call) if told is None else told


def _after_return(call: Call) -> bool | None:
    """Which ranks are left where others return above the call, straight in its function's body."""
    function = function_of(call)
    for node in function.body[:_LOOKED_AT] if isinstance(function, ast.FunctionDef) else ():
        if node.lineno >= call.node.lineno:
            return None
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return):
            gone = on_one_rank(node.test)
            if gone is not None and call.node.lineno > (node.end_lineno or 0):
                return not gone
    return None


def is_sharded(plan: Plan | None, files: FileSet, settings: Settings) -> bool:
    """Whether the files here say that no rank has the whole model: ZeRO-3, or accelerate's FSDP."""
    config = one_config(plan, files, settings)
    if config is not None and config.stage == 3:
        return True
    return any(
        file.get("distributed_type") == "FSDP" or file.get("deepspeed_config", "zero_stage") == 3
        for file in files.of("accelerate")
    )


def _is_collective(script: Script, call: Call, *, sharded: bool) -> bool:
    if sharded and (call.name in script.engines or call.method in _OF_SHARDS):
        return call.name in script.engines or call.owner in script.accelerators
    if call.method in OF_ACCELERATE:
        return call.owner in script.accelerators
    if call.method == "state_dict":
        return call.owner in script.sharded
    if call.name in OF_CHECKPOINTS:
        return call.keyword("no_dist") is None and call.keyword("process_group") is None
    of_torch = call.owner in ("torch.distributed", "deepspeed.comm") and call.method in COLLECTIVES
    return of_torch or (call.method in _OF_ENGINES and call.owner in script.engines)


@rule(
    "script.save-on-every-rank",
    severity="wrong",
    raised_by="nobody",
    evidence=f"{_DOCS}: DistributedDataParallel",
)
def save(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Every rank writes the same file: it may end up torn."""
    for script in scripts(files):
        if not script.own_loop or not script.called(DDP, FSDP) or script.deepspeed:
            continue
        for call in script.called("torch.save") if not _OWN_DISKS.search(script.python.text) else ():
            if not _guarded(script, call) and not _named_by_rank(script, call):
                message = "every rank writes this file, one over the other."
                yield script.hit(
                    call, message, "Write it under `if dist.get_rank() == 0:`, then call barrier."
                )


_OF_A_RANK = re.compile(
    r"rank|main|master|should_save|gpu|device_id|local|worker|proc|primary|leader|chief|\bfirst|is_first|node_id"
    r"|standalone|distributed|world|initialized|single|ddp"
)
"""Words of conditions by which one process writes: `self.gpu_id == 0` of LOCAL_RANK."""
_OWN_DISKS = re.compile(r"\bSM_(?:MODEL_DIR|HOSTS|CURRENT_HOST)\b|BytesIO")
"""What tells that each process writes where no other does: a container of SageMaker's, or memory."""


def _guarded(script: Script, call: Call) -> bool:
    """Whether a condition on the rank is around the call, before it, or around a call of its function."""
    told = (each.keyword("rank") for each in script.called(INIT))
    own = "".join(f"|\\b{each.id}\\b" for each in told if isinstance(each, ast.Name))
    tests = (ast.unparse(node.test).replace("__main__", "") for node, _ in guards(call))
    if any(re.search(f"{_OF_A_RANK.pattern}{own}", test) for test in tests):
        return True
    function = function_of(call)
    if function is None:
        return False
    assert isinstance(function, ast.FunctionDef)
    if _OF_A_RANK.search("\n".join(_tests(function))):
        return True
    uses = [each for each in script.every if each.method == function.name]
    return not uses or any(_guarded(script, each) for each in uses if function_of(each) is not function)


def _tests(function: ast.FunctionDef) -> Iterator[str]:
    """The conditions of a function that end it early."""
    for node in function.body:
        if isinstance(node, ast.If) and any(isinstance(each, ast.Return) for each in node.body):
            yield ast.unparse(node.test)


def _named_by_rank(script: Script, call: Call) -> bool:
    """Whether the rank stands in a file's name, over the names that it is put together from."""
    names, held = set[str](), [*call.node.args[1:], *(each.value for each in call.node.keywords)]
    while held:
        node = held.pop()
        if "rank" in ast.unparse(node).lower():
            return True
        found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - names
        names |= found
        held += [value for name in found for value in assigned(script, name)]
        more = (each for each in script.nodes if isinstance(each, ast.AugAssign))
        held += [each.value for each in more if isinstance(each.target, ast.Name) and each.target.id in found]
    return False


@rule(
    "script.module-prefix", severity="wrong", raised_by="nobody", evidence=f"{_DOCS}: DistributedDataParallel"
)
def module_prefix(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The state of the wrapped model is saved: each name begins with module."""
    for script in scripts(files):
        wrapped = script.assigned(DDP)
        for call in script.methods("state_dict") if script.own_loop and not _strips(script) else ():
            inside = any(
                isinstance(node, ast.Call) and script.name(node.func) == "torch.save" for node in call.around
            )
            name = handed(script, call, wrapped)
            loads = loaded_before(script, name) if name else None
            name = name if loads is not None else call.owner if inside and call.owner in wrapped else ""
            if name:
                message = f"{name} is wrapped: every name in the file begins with `module.`"
                if loads is not None:
                    message = (
                        f"{message}, and line {loads.node.lineno} loads it above the wrapping: RuntimeError, "
                        "Missing key(s) in state_dict."
                    )
                found = script.hit(call, message, f"Save {name}.module.state_dict().")
                yield replace(found, severity="error", raised_by="torch") if loads is not None else found
        yield from of_resumes(script) if script.own_loop and not _strips(script) else ()


def _strips(script: Script) -> bool:
    """Whether the file takes the prefix off, or puts it on, where it loads."""
    nodes = script.nodes
    texts = (str(node.value) for node in nodes if isinstance(node, ast.Constant))
    named = any(re.fullmatch(r"\^?module\\?\.", text) for text in texts)
    return named or bool(script.methods("consume_prefix_in_state_dict_if_present"))


@rule(
    "script.timeout",
    severity="info",
    raised_by="nobody",
    evidence=f"{_DOCS}: init_process_group, default 10 minutes",
)
def timeout(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """No timeout for the process group: NCCL's 10 minutes, too short for some starts, too long for others."""
    for script in scripts(files):
        for call in script.called(INIT, "deepspeed.init_distributed") if script.own_loop else ():
            without = call.method == "init_process_group" and script.constant(call.argument("backend", 0)) == "mpi"
            if call.keyword("timeout") is None and not call.unpacks and not without:
                message = (
                    f"{call.method} without a timeout: a lost rank is noticed after 10 minutes (gloo: 30)."
                )
                yield script.hit(
                    call, message, "Give timeout=timedelta(minutes=...), longer than the slowest start."
                )


@rule("script.find-unused", severity="slow", raised_by="nobody", evidence=f"{_DOCS}: DistributedDataParallel")
def find_unused(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """find_unused_parameters=True walks the graph at every step."""
    for script in scripts(files):
        for call in script.called(DDP):
            value = call.keyword("find_unused_parameters")
            if isinstance(value, ast.Constant) and value.value is True:
                message = "find_unused_parameters=True walks the whole graph after each forward pass."
                yield script.hit(call, message, "Leave it out where every parameter gets a gradient.")


@rule("script.item", severity="info", raised_by="nobody", evidence=f"{_DOCS}: Tensor.item synchronises")
def item(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """.item() at each step waits for the GPU: advice."""
    for script in scripts(files):
        for call in script.methods("item") if script.own_loop else ():
            loop = next((node for node in call.around if isinstance(node, ast.For | ast.While)), None)
            trains = loop is not None and any(
                isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop)
            )
            if trains and call.owner.endswith("loss") and not list(guards(call)):
                yield script.hit(
                    call, f"{call.owner}.item() waits for the GPU at each step.", "Log every N steps."
                )
