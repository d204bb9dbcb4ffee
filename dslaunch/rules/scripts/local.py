"""Numbers of one node where those of all nodes are meant: which samples a rank reads, and who it is."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import INIT, Script, scripts
from dslaunch.rules.settings import Settings

_ASKED = {"torch.utils.data.DistributedSampler": ("num_replicas", "rank"), INIT: ("world_size", "rank")}
"""Arguments that are numbers among all ranks; each is given by its name."""
_RANK = re.compile(r"\bLOCAL_RANK\b|\bSLURM_LOCALID\b|\blocal_rank\b")
_DEEP = 4
"""Names that stand for one another are followed so far."""
_COUNT = re.compile(r"\bdevice_count\(\)|\bLOCAL_WORLD_SIZE\b|\bSLURM_GPUS_ON_NODE\b|\blocal_world_size\b")


@rule(
    "script.local-number", severity="wrong", raised_by="nobody",
    evidence="PyTorch 2.13 documentation: DistributedSampler, init_process_group",
)  # fmt: skip
def local_number(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A rank or a number of processes of one node as one among all, in a run of several nodes."""
    nodes = settings.nodes or 1
    own = [script for _, _, script in launched(files)] if any(True for _ in files.launches()) else None
    for script in scripts(files) if nodes > 1 else ():
        if own is not None and script not in own:
            continue  # another script is started on so many nodes
        for name, arguments in _ASKED.items():
            for call in script.called(name):
                odd = [each for each in arguments if _is_local(script, call.keyword(each), call.around, _DEEP)]
                if not odd:
                    continue
                effect, severity = _effect(name, nodes)
                message = f"{' and '.join(odd)} of one node, in a run of {nodes}: {effect}."
                fix = 'Leave them out, or take int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"]).'
                yield replace(script.hit(call, message, fix), severity=severity)


def _effect(name: str, nodes: int) -> tuple[str, Severity]:
    if name == INIT:
        return "several processes take themselves for the same rank, and wait for others that never come", "hang"
    return f"every node reads the same samples, {nodes} times in each epoch", "wrong"


def _is_local(script: Script, given: ast.expr | None, around: tuple[ast.AST, ...], deep: int) -> bool:
    """Whether it is a number of one node, by itself: `node * 8 + local_rank` is none."""
    if given is None or not deep:
        return False
    if isinstance(given, ast.Name):
        made = possible(script, given, around) or assigned(script, given.id)
        others = [each for each in made if not (isinstance(each, ast.Name) and each.id == given.id)]
        if others:
            return all(_is_local(script, each, around, deep - 1) for each in others)
    if any(isinstance(each, ast.BinOp | ast.IfExp | ast.BoolOp) for each in ast.walk(given)):
        return False
    text = ast.unparse(given)
    return bool(_RANK.search(text) or _COUNT.search(text))


@rule(
    "script.local-rank", severity="wrong", raised_by="nobody", evidence="torch/distributed/run.py 2.13, run",
)  # fmt: skip
def local_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A script that reads its rank from --local_rank, under torchrun, which passes none."""
    by_torchrun = {
        script.path: (script, launcher)
        for _, command, script in launched(files) if (launcher := command.launcher("torchrun"))
    }  # fmt: skip
    for script, launcher in by_torchrun.values():
        if "LOCAL_RANK" in script.python.text or not _uses_its_local_rank(script):
            continue
        for call in script.methods("add_argument"):
            names = [str(each.value) for each in call.node.args if isinstance(each, ast.Constant)]
            if "--local_rank" not in names and "--local-rank" not in names:
                continue
            if launcher.spelled != "torch.distributed.launch":  # torchrun.launch-local-rank
                message = f"{names[0]} is never given by torchrun: the default is every process's rank."
                yield script.hit(call, message, 'Read int(os.environ["LOCAL_RANK"]).')


_SETS_UP = re.compile(r"^(?:init|setup|set_up)_.*dist|^distributed_init|^init_dist")
"""Functions of other modules that read LOCAL_RANK, and set args.local_rank."""


def _uses_its_local_rank(script: Script) -> bool:
    """Whether the argument is read here, or may be elsewhere: what was parsed is handed on as a whole."""
    nodes = list(script.nodes)
    parsed = {
        name.id for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        and script.name(node.value.func).endswith(".parse_args")
        for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)
    }  # fmt: skip
    reads = [
        node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "local_rank"
        and (not parsed or ast.unparse(node.value) in {*parsed, "args"})
    ]  # fmt: skip
    filled = [
        call for call in script.calls
        if call.method not in (*script.functions, "print", "initialize")
        and any(isinstance(each, ast.Name) and each.id in parsed for each in call.node.args)
    ]  # fmt: skip
    if reads:
        first = min((call.node.lineno for call in filled), default=sys.maxsize)
        return first > min(node.lineno for node in reads)
    taken_apart = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    within = {
        id(each) for call in script.calls if call.name in (*script.functions, "print", "vars", "str", "repr")
        for each in (*call.node.args, *(one.value for one in call.node.keywords))
    }  # fmt: skip
    handed = any(node.id in parsed and id(node) not in taken_apart | within for node in names)
    sets_up = any(_SETS_UP.search(call.method) for call in filled)
    return not parsed or (handed and not sets_up)
