"""What is computed from a rank's own share of the data: a loss over a loader with a sampler by ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import LOADER, Script, is_none

SHARES = re.compile(r"reduce|gather|broadcast|sync(?!hronize)|across|world|average_loss|dist_")
"""What a call is named that makes one value of those of all ranks."""
_OF_SAMPLES = re.compile(
    r"(?:\w*criterion|crit|loss_fn|loss_func|loss_function|\w*cross_entropy\w*|(?:smooth_)?(?:mse|nll|l1)_loss)"
)
"""What a call is named that gives a loss, where the name that gets it tells nothing."""
_SAMPLER = "torch.utils.data.DistributedSampler"
_LOADERS = (LOADER, "DataLoader")
_THROUGH = ("enumerate", "tqdm")


def is_of_share(script: Script, value: ast.expr) -> bool:
    """Whether a loss over this rank's share of the data is computed, there or by a function of the file."""
    shared = any(is_shared_out(script, ast.unparse(each)) for each in _held(value))
    if shared and computes_loss(value):
        return True
    function = script.functions.get(method(value)) if isinstance(value, ast.Call) else None
    if function is None or not (shared or _reads_share(script, function)):
        return False
    text = ast.unparse(function)
    computes = re.search(r"loss|criterion|cross_entropy|correct|accuracy", text) is not None
    return computes and not SHARES.search(text)


def _held(value: ast.expr) -> Iterator[ast.expr]:
    """Names and attributes of names in an expression."""
    return (each for each in ast.walk(value) if isinstance(each, ast.Name | ast.Attribute))


def _reads_share(script: Script, function: ast.FunctionDef) -> bool:
    """Whether a function loops over what an attribute holds that is shared out: `self.val_loader`."""
    loops = (node for node in ast.walk(function) if isinstance(node, ast.For))
    return any(is_shared_out(script, ast.unparse(read)) for loop in loops
               if isinstance(read := looped(loop), ast.Attribute))  # fmt: skip


def looped(loop: ast.For) -> ast.expr:
    """What a loop goes through, without `enumerate` and `tqdm` around it."""
    read = loop.iter
    while isinstance(read, ast.Call) and method(read) in _THROUGH and read.args:
        read = read.args[0]
    return read


def within(loop: ast.For) -> Iterator[ast.AST]:
    """What stands in a loop, and in no other loop within it."""
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)


def computes_loss(value: ast.expr) -> bool:
    """Whether an expression calls what gives a loss."""
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
    return any(_OF_SAMPLES.fullmatch(method(node)) for node in calls)


def is_shared_out(script: Script, text: str) -> bool:
    """Whether all that a name or attribute holds in the file are loaders with a sampler by ranks."""
    found = assigned(script, text)
    made = [each for each in found if not _is_prepared(script, each)]
    if not made or not all(isinstance(each, ast.Call) and script.name(each.func) in _LOADERS for each in made):
        return False
    rewrapped = len(made) < len(found) or _is_given(script, text)
    return all(_is_shared(script, each, prepared=rewrapped) for each in made if isinstance(each, ast.Call))


def _is_prepared(script: Script, value: ast.expr) -> bool:
    """Whether a value comes out of accelerate's prepare, or is a part of what does."""
    made = isinstance(value, ast.Call) and method(value).startswith("prepare")
    return made or (isinstance(value, ast.Constant) and value.value is ... and bool(script.accelerators))


def _is_given(script: Script, text: str) -> bool:
    """Whether an Accelerator gets a loader, which it shares out."""
    return any(
        ast.unparse(each) == text
        for call in script.methods("prepare", "prepare_data_loader") if call.owner in script.accelerators
        for each in call.node.args
    )  # fmt: skip


def _is_shared(script: Script, made: ast.Call, *, prepared: bool) -> bool:
    given = next((each.value for each in made.keywords if each.arg == "sampler"), None)
    if given is None or prepared:
        return prepared
    samplers = [part for each in _values(script, given) for part in _branches(each)]
    by_rank = [isinstance(each, ast.Call) and script.name(each.func) == _SAMPLER for each in samplers]
    told = (is_none(each) or ours for each, ours in zip(samplers, by_rank, strict=True))
    return any(by_rank) and all(told)


def _values(script: Script, node: ast.expr) -> list[ast.expr]:
    return assigned(script, ast.unparse(node)) if isinstance(node, ast.Name | ast.Attribute) else [node]


def _branches(node: ast.expr) -> list[ast.expr]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def method(call: ast.Call) -> str:
    """The last part of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]
