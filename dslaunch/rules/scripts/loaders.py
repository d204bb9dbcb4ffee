"""Training scripts whose DataLoader or process group torch refuses, or whose ranks draw different orders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.objects import beside
from dslaunch.rules.scripts.seeds import why_unlike
from dslaunch.rules.scripts.tree import DDP, LOADER, Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_STREAM = "torch.utils.data.IterableDataset"
_RAN = "torch 2.13, run"


@rule("script.loader", severity="error", raised_by="torch", evidence=_RAN)
def loader(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DataLoader with options that exclude each other, or that need processes or a length."""
    for script in scripts(files):
        streams = _streams(script)
        for call in script.called(LOADER):
            if not call.unpacks:
                yield from _needs_workers(files, script, call)
            data = script.bound(call.argument("dataset", 0))
            if not isinstance(data, ast.Call) or script.name(data.func) not in streams:
                continue
            shuffle, given = call.keyword("shuffle"), call.keyword("sampler")
            if isinstance(shuffle, ast.Constant) and shuffle.value is True:
                message = f"{script.name(data.func)} is an IterableDataset, which shuffle=True can't: ValueError."
                yield script.hit(call, message, "Shuffle within the data set; leave shuffle out here.")
            elif given is not None and not is_none(given):
                message = (
                    f"{script.name(data.func)} is an IterableDataset, which takes no sampler: ValueError, or "
                    "TypeError, it has no len()."
                )
                fix = "Share the samples out in __iter__: every WORLD_SIZE-th, from RANK on."
                yield script.hit(call, message, fix)


def _streams(script: Script) -> set[str]:
    """The file's own classes that are an IterableDataset."""
    classes = (node for node in script.nodes if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if any(script.name(base) == _STREAM for base in node.bases)}


def _needs_workers(files: FileSet, script: Script, call: Call) -> Iterator[Hit]:
    """prefetch_factor and persistent_workers without processes that read."""
    workers = call.argument("num_workers", 5)
    if workers is not None and value_of(files, script, workers, call.around) != 0:
        return
    factor, stay = (
        value_of(files, script, call.keyword(name), call.around)
        for name in ("prefetch_factor", "persistent_workers")
    )
    name = "persistent_workers" if stay is True else "prefetch_factor" if type(factor) is int else ""
    if name:
        message = f"{name} without num_workers: ValueError."
        yield script.hit(call, message, f"Give num_workers from 1 on, or leave {name} out.")


@rule("script.sampler-seed", severity="wrong", raised_by="nobody", evidence=_RAN)
def sampler_seed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DistributedSampler whose seed holds the rank: ranks share out different orders of the samples."""
    for script in scripts(files):
        for call in script.called("torch.utils.data.DistributedSampler"):
            seed, shuffle = call.argument("seed", 4), script.constant(call.argument("shuffle", 3))
            held = [each for each in ast.walk(seed) if isinstance(each, ast.Name | ast.Attribute)] if seed else []
            if shuffle is not False and any(_is_rank(script, each) for each in held):
                message = (
                    "each rank draws an order of its own and takes its share of that: some samples come several "
                    "times in an epoch, others never."
                )
                yield script.hit(call, message, "Give the same seed on all ranks.")


def _is_rank(script: Script, node: ast.expr) -> bool:
    name = script.name(node).rpartition(".")[2]
    return name in ("rank", "local_rank", "global_rank", "get_rank", "process_index")


@rule("script.world-size", severity="error", raised_by="torch", evidence=f"{_RAN} on two ranks")
def world_size(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A number of ranks written into init_process_group that isn't the one that is started."""
    started = settings.world_size
    launched = {each.script.text.rpartition("/")[2] for _, each in files.launches() if each.script}
    for script in scripts(files) if started is not None else ():
        own = "spawn" in script.python.text or "Process(" in script.python.text
        if own or (launched and script.path.rpartition("/")[2] not in launched):
            continue  # it starts ranks itself, or another script is started
        for call in script.called("torch.distributed.init_process_group"):
            count = script.constant(call.keyword("world_size"))
            if type(count) is not int or count < 2 or count == started or list(guards(call)):
                continue  # 1 is for the script alone, without a launcher
            what = (
                f"the ranks from {count} on are none: RuntimeError"
                if started is not None and count < started
                else "they wait for the others, up to the timeout"
            )
            message = f"world_size={count}, and {started} processes are started: {what}."
            found = script.hit(call, message, "Leave rank and world_size out: torchrun tells them.")
            yield found if started is not None and count < started else replace(found, severity="hang")


_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


@rule("script.reentrant", severity="error", raised_by="torch", evidence=_RAN)
def reentrant(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Reentrant recomputation under DDP with find_unused_parameters: a parameter is marked ready twice."""
    for script in scripts(files):
        wraps = [
            call for call in script.called(DDP)
            if script.constant(call.keyword("find_unused_parameters")) is True
            and call.keyword("static_graph") is None
        ]  # fmt: skip
        if not wraps or "_set_static_graph" in script.python.text:
            continue
        for call in script.called(_CHECKPOINT):
            if script.constant(call.keyword("use_reentrant")) is True:
                message = (
                    f"recomputed within backward, while DDP in line {wraps[0].node.lineno} looks for unused "
                    "parameters: RuntimeError, Expected to mark a variable ready only once."
                )
                yield script.hit(call, message, "Write use_reentrant=False, or static_graph=True to DDP.")
    for script in scripts(files):
        for call in script.methods("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"):
            given = script.bound(call.keyword("gradient_checkpointing_kwargs"))
            items = zip(given.keys, given.values, strict=True) if isinstance(given, ast.Dict) else ()
            told = {str(script.constant(key)): script.constant(value) for key, value in items}
            on = script.constant(call.keyword("gradient_checkpointing")) is True
            looks = script.constant(call.keyword("ddp_find_unused_parameters")) is True
            if on and looks and told.get("use_reentrant") is True:
                message = (
                    "recomputed within backward, while DDP looks for unused parameters: RuntimeError, Expected to "
                    "mark a variable ready only once."
                )
                fix = 'Write {"use_reentrant": False}, or drop ddp_find_unused_parameters.'
                yield script.hit(call, message, fix)


@rule("script.worker-lambda", severity="error", raised_by="python", evidence="torch 2.13, Python 3.11, run")
def worker_lambda(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A loader whose processes are spawned, and that holds a lambda, which can't be handed to them."""
    every = list(scripts(files))
    for script in every:
        for call in script.called(LOADER) if "lambda" in script.python.text else ():
            context, workers = call.keyword("multiprocessing_context"), call.argument("num_workers", 5)
            if workers is None or script.constant(workers) == 0 or not (held := _lambda(script, call)):
                continue
            if _spawns(script, every) if context is None else script.constant(context) in _SPAWNED:
                message = f"the loader's processes are spawned, and {held} is a lambda: PicklingError."
                yield script.hit(call, message, "Write it as a function at the top of the module.")


def _spawns(script: Script, every: list[Script]) -> bool:
    """Whether processes are spawned by a setting of the file, or of one that imports from it."""
    starts = [(each, call) for each in every for call in each.methods("set_start_method")]
    spawning = [each for each, call in starts if each.constant(call.argument("method", 0)) in _SPAWNED]
    return any(each is script or _imports(each, script, every) for each in spawning)


def _imports(script: Script, other: Script, every: list[Script]) -> bool:
    return any(other is each for full in script.imports.values() for each in beside(script, full, every))


_SPAWNED = ("spawn", "forkserver")


def _lambda(script: Script, call: Call) -> str:
    """What of a loader is a lambda: a function of its own, or what its data set is made with."""
    for name, place in (("collate_fn", 6), ("worker_init_fn", 10)):
        given = call.argument(name, place)
        made = possible(script, given, call.around) if given is not None else []
        if made and all(isinstance(each, ast.Lambda) for each in made):
            return name
    data = call.argument("dataset", 0)
    made = possible(script, data, call.around) if data is not None else []
    for each in made if len(made) == 1 else ():
        for inner in (*each.args, *(one.value for one in each.keywords)) if isinstance(each, ast.Call) else ():
            held = possible(script, inner, call.around)
            if held and all(isinstance(one, ast.Lambda) for one in held):
                return ast.unparse(inner) if isinstance(inner, ast.Name) else "what the data set is made with"
    return ""


@rule(
    "script.worker-cuda", severity="error", raised_by="torch",
    evidence="pytorch/pytorch:torch/cuda/__init__.py _lazy_init 2.13; PyTorch 2.13 documentation: multiprocessing",
)  # fmt: skip
def worker_cuda(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A data set or collate_fn that makes tensors on the GPU, in processes that are forked to read."""
    for script in scripts(files):
        if "spawn" in script.python.text or "forkserver" in script.python.text:
            continue
        for call in script.called(LOADER):
            workers = value_of(files, script, call.argument("num_workers", 5), call.around)
            if type(workers) is not int or workers < 1:
                continue
            for name, body in _run_by_workers(script, call):
                calls = (each for each in ast.walk(body) if isinstance(each, ast.Call))
                found = next((each for each in calls if _on_gpu(script, each)), None)
                if found is not None:
                    message = (
                        f"{name} runs in {workers} forked processes, and the script uses the GPU before: "
                        "RuntimeError, Cannot re-initialize CUDA in forked subprocess."
                    )
                    fix = "Make CPU tensors here, and move the batch in the loop: .to(device, non_blocking=True)."
                    yield Hit(script.path, script.python.at(found), message, fix)


def _run_by_workers(script: Script, call: Call) -> Iterator[tuple[str, ast.AST]]:
    """The functions of the file that a loader's processes run."""
    given = script.bound(call.argument("collate_fn", 7))
    if isinstance(given, ast.Lambda):
        yield "collate_fn", given
    elif (name := script.name(call.argument("collate_fn", 7) or call.node)) in script.functions:
        yield name, script.functions[name]
    data = script.bound(call.argument("dataset", 0))
    made = script.name(data.func) if isinstance(data, ast.Call) else ""
    for node in script.nodes:
        if isinstance(node, ast.ClassDef) and node.name == made:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name in ("__getitem__", "__getitems__", "__iter__"):
                    yield f"{made}.{part.name}", part


def _on_gpu(script: Script, node: ast.Call) -> bool:
    """Whether a call makes or moves something on a GPU, as far as its words tell."""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method == "cuda" and script.name(node.func) != "torch.cuda":
        return True
    places = [each.value for each in node.keywords if each.arg == "device"]
    places += node.args[:1] if method == "to" else []
    return any(_is_gpu(script, each) for each in places)


def _is_gpu(script: Script, place: ast.expr) -> bool:
    bound = script.bound(place)
    made = bound.args[0] if isinstance(bound, ast.Call) and bound.args else bound
    if isinstance(bound, ast.Call) and script.name(bound.func) != "torch.device":
        return False
    first = made.body if isinstance(made, ast.IfExp) else made
    first = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
    return isinstance(first, ast.Constant) and str(first.value).startswith("cuda")


_SPLITS = "torch.utils.data.random_split"


@rule("script.split-seed", severity="wrong", raised_by="nobody", evidence="torch 2.13, run on two ranks")
def split_seed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A random split under a seed that holds the rank, or none: what one rank validates on, others train on."""
    every = list(scripts(files))
    for script in every:
        for call in script.called(_SPLITS) if script.own_loop or script.accelerators else ():
            if call.argument("generator", 2) is not None or call.unpacks:
                continue
            if why := why_unlike(script, call, "torch", every):
                message = (
                    f"{why}: each rank splits otherwise, trains on what others validate on, and of the whole "
                    "some samples come several times and others never."
                )
                yield script.hit(call, message, "Give generator=torch.Generator().manual_seed(0).")
