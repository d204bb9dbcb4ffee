"""What training scripts hand to collectives, and which GPU they build the model on before ranks are told apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.guards import COLLECTIVES, function_of, guards
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_MADE = re.compile(
    r"torch\.(?:zeros|ones|empty|full|arange|eye|rand|randn|randint|linspace|as_tensor|tensor|FloatTensor|LongTensor"
    r"|IntTensor|from_numpy)"
)
_PLAIN = (
    "float",
    "int",
    "len",
    "bool",
    "time",
    "item",
    "tolist",
    "from_bytes",
    "randint",
    "randrange",
    "perf_counter",
)
"""Calls that give numbers to Python, which a tensor of the CPU is made of."""
_SECOND = ("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter",
           "reduce_scatter_tensor")  # fmt: skip
"""Collectives whose second argument is what this rank sends."""
_DEFAULTS = re.compile(r"set_default_device|set_default_tensor_type|torch\.device\([^)]*\):")


@rule(
    "script.cpu-tensor", severity="error", raised_by="torch",
    evidence="torch 2.13, run with a process group for the GPU alone",
)  # fmt: skip
def cpu_tensor(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A collective on a tensor of the CPU, or on a number, in a process group of NCCL."""
    for script in scripts(files):
        yield from _of_numbers(script)
        starts = script.called("torch.distributed.init_process_group")
        backends = {script.constant(call.argument("backend", 0)) for call in starts}
        others = _DEFAULTS.search(script.python.text) or script.called("torch.distributed.new_group")
        if backends != {"nccl"} or others:
            continue
        for call in script.calls:
            if call.owner != "torch.distributed" or call.method not in COLLECTIVES or "object" in call.method:
                continue
            given = call.argument(
                "tensor" if call.method not in _SECOND else "input", int(call.method in _SECOND)
            )
            made = (
                possible(script, given, call.around) if given is not None and call.method != "barrier" else []
            )
            if made and all(_on_cpu(script, each) for each in made):
                message = (
                    f"{ast.unparse(made[-1])} is on the CPU, and the process group is NCCL's: RuntimeError, No "
                    "backend type associated with device type cpu."
                )
                fix = 'Make it with device=, or start "cpu:gloo,cuda:nccl".'
                yield script.hit(call, message, fix)


_OF_TENSORS = ("all_reduce", "broadcast", "reduce")


def _is_looped(call: Call, given: ast.expr) -> bool:
    """Whether a loop around a call binds what it is given."""
    loops = [node.target for node in call.around if isinstance(node, ast.For)]
    names = {each.id for target in loops for each in ast.walk(target) if isinstance(each, ast.Name)}
    return isinstance(given, ast.Name) and given.id in names


def _of_numbers(script: Script) -> Iterator[Hit]:
    """Collectives on a number of Python's, which is no tensor."""
    for call in script.calls:
        if call.owner != "torch.distributed" or call.method not in _OF_TENSORS:
            continue
        given = call.argument("tensor", 0)
        if given is None:
            continue
        text = ast.unparse(given)
        made = possible(script, given, call.around)
        if not made and not _is_looped(call, given):
            made = assigned(script, text)
        added = [
            node.value for node in ast.walk(call.function or script.python.tree)
            if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == text
        ]  # fmt: skip
        if made and all(map(_is_number, (*made, *added))):
            message = f"{text} is a number of Python's: TypeError."
            yield script.hit(call, message, "Make a tensor of it: torch.tensor([...], device=device).")


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        named = ast.unparse(node.func)
        return named in ("int", "float", "len") or (named.endswith((".item", ".numel")) and not node.args)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _on_cpu(script: Script, node: ast.expr) -> bool:
    """Whether an expression makes a tensor of the CPU, as far as its words tell."""
    if not isinstance(node, ast.Call):
        return False
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method == "cpu" and not node.args:
        return True
    name = script.name(node.func)
    if not _MADE.fullmatch(name) or any(each.arg in ("device", None) for each in node.keywords):
        return False
    copies = name in ("torch.tensor", "torch.as_tensor")
    return not copies or (bool(node.args) and _is_plain(node.args[0]))


def _is_plain(node: ast.expr) -> bool:
    """Numbers, or a list: of a tensor torch.tensor would take the device."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in _PLAIN
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    if isinstance(node, ast.Compare):
        return all(_is_plain(each) for each in (node.left, *node.comparators))
    return isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.ListComp)


@rule(
    "script.early-device", severity="memory", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/comm/comm.py init_distributed, runtime/engine.py 0.19.8",
)  # fmt: skip
def early_device(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A model put on "cuda" before deepspeed.initialize sets each process's GPU: all are on a node's first."""
    for script in scripts(files) if settings.ranks_per_node != 1 else ():
        chosen = re.search(r"set_device|CUDA_VISIBLE_DEVICES|zero\.Init", script.python.text)
        for made in script.deepspeed if not chosen and len(script.deepspeed) == 1 else ():
            model = made.argument("model", 1)
            name = model.id if isinstance(model, ast.Name) else ""
            for call in script.every:
                same = function_of(call) is function_of(made) and not list(guards(call))
                if same and name and call.node.lineno < made.node.lineno and _moves(script, call, name):
                    message = (
                        f"before deepspeed.initialize in line {made.node.lineno} sets the device: the model of "
                        "each process of a node lies on its first GPU."
                    )
                    fix = 'Leave it to initialize, or call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).'
                    yield script.hit(call, message, fix)


def _moves(script: Script, call: Call, model: str) -> bool:
    """Whether a call puts the model on a GPU without a number."""
    ours = call.owner == model or script.bound(ast.Name(model, ast.Load())) is call.node
    if not ours or len(call.node.args) > 1:
        return False
    given = script.bound(call.node.args[0]) if call.node.args else None
    if call.method == "cuda":
        return not call.node.args and not call.node.keywords
    if isinstance(given, ast.Call) and script.name(given.func) == "torch.device" and len(given.args) == 1:
        given = given.args[0]
    return call.method == "to" and isinstance(given, ast.Constant) and given.value == "cuda"


_LISTS = {"gather": "gather_list", "scatter": "scatter_list", "gather_object": "object_gather_list"}
_RANK = re.compile(r"(?i)rank|is_main|is_master|main_process|process_index")
_PLACES = {"gather": 1, "scatter": 1, "gather_object": 1}


@rule("script.gather-list", severity="error", raised_by="torch", evidence="torch 2.13, run on two ranks")
def gather_list(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """gather or scatter with a list on all ranks, which one alone may give."""
    for script in scripts(files):
        for call in script.calls:
            if call.owner != "torch.distributed" or call.method not in _LISTS or call.unpacks:
                continue
            name = _LISTS[call.method]
            given = call.argument(name, _PLACES[call.method])
            made = possible(script, given, call.around) if given is not None else []
            told_apart = any(_RANK.search(ast.unparse(node.test)) for node, _ in guards(call))
            others = (each for each in script.methods(call.method) if each.node is not call.node)
            told_apart |= any((list_of := each.argument(name, _PLACES[call.method])) is None or is_none(list_of)
                              for each in others)  # fmt: skip
            if made and all(_is_list(each) for each in made) and not told_apart:
                end = "destination" if call.method != "scatter" else "source"
                message = f"{name} is given on all ranks: ValueError on each but the {end}."
                yield script.hit(call, message, f"Write {name}=... if rank == 0 else None.")


def _is_list(node: ast.expr) -> bool:
    """Whether it is a list that holds something, which alone counts as given."""
    if isinstance(node, ast.BinOp):
        return _is_list(node.left)
    return isinstance(node, ast.ListComp) or (isinstance(node, ast.List) and bool(node.elts))
