"""Models whose forward pass calls a part by what this rank's own samples hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import DDP, FSDP, FULLY_SHARD, Call, Script, scripts
from dslaunch.rules.settings import Settings

_ASKS = re.compile(r"\.(?:any|all|sum|numel|max|min|count_nonzero|nonzero)\(|\blen\(")
"""What asks for the content of a tensor, not for whether there is one."""
_SHARDS = (*FULLY_SHARD, FSDP)
_PLAIN = re.compile(r"(?:Dropout\w*|ReLU|GELU|SiLU|Identity|Softmax|Flatten|\w*Loss|\w*Pool\w*)$")
"""Parts without parameters."""


@rule(
    "script.uneven-forward",
    severity="hang",
    raised_by="nobody",
    evidence="DeepSpeed 0.19.8, run on two ranks",
)
def uneven_forward(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A part of a model that is called only where this rank's samples have something for it."""
    config = one_config(plan, files, settings)
    for script in scripts(files):
        zero3 = bool(script.deepspeed) and config is not None and config.stage == 3
        waits = [call for call in script.called(DDP) if not call.unpacks and not _finds(call)]
        sharded = zero3 or bool(script.called(*_SHARDS))
        for test, part in _conditional(script) if sharded or waits else ():
            if sharded:
                message = (
                    f"a rank whose samples don't meet this leaves {part} out, and the others wait for it to "
                    "gather the weights; or it meets them in another layer."
                )
                found = Hit(script.path, script.python.at(test), message, _FIX)
                yield found
            else:
                message = (
                    f"where the samples don't meet this, DistributedDataParallel waits for the gradients of "
                    f"{part}: RuntimeError in the next step, Expected to have finished reduction."
                )
                found = Hit(script.path, script.python.at(test), message, _FIX)
                yield replace(found, severity="error", raised_by="torch")


def _finds(call: Call) -> bool:
    """Whether DDP is told to find out which parameters got no gradient."""
    return any(call.keyword(name) is not None for name in ("find_unused_parameters", "static_graph"))


_FIX = "Call it on every rank in each pass: on zeros, with the result times 0, where there is nothing."


def _conditional(script: Script) -> Iterator[tuple[ast.expr, str]]:
    """Conditions in forward on what its arguments hold, and the part that one branch alone calls."""
    for node in script.nodes:
        if not isinstance(node, ast.ClassDef) or "Module" not in " ".join(map(ast.unparse, node.bases)):
            continue
        functions = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        parts = set(_parts(functions["__init__"])) if "__init__" in functions else set()
        forward = functions.get("forward")
        names = {each.arg for each in forward.args.args} - {"self"} if forward is not None else set()
        for each in ast.walk(forward) if forward is not None else ():
            if isinstance(each, ast.If) and _ASKS.search(ast.unparse(each.test)):
                asked = {one.id for one in ast.walk(each.test) if isinstance(one, ast.Name)}
                only = _called(each.body, parts) ^ _called(each.orelse, parts)
                if asked & names and only and "training" not in ast.unparse(each.test):
                    yield each.test, f"self.{min(only)}"


def _parts(init: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            of_self = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            name = ast.unparse(node.value.func).rpartition(".")[2]
            if (
                of_self
                and isinstance(target, ast.Attribute)
                and name[:1].isupper()
                and not _PLAIN.search(name)
            ):
                yield target.attr


def _called(body: list[ast.stmt], parts: set[str]) -> set[str]:
    """The parts that statements call: `self.vision(...)`."""
    calls = [node.func for each in body for node in ast.walk(each) if isinstance(node, ast.Call)]
    methods = [each for each in calls if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"]
    return {each.attr for each in methods} & parts
