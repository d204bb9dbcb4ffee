"""Training scripts in which a rank may leave the others in the middle of a step, by what it alone has seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts_tree import DDP, FSDP, Call, Script, function_of, guards, scripts
from dslaunch.rules.settings import Settings

_SHARES = re.compile(r"reduce|gather|broadcast|sync|across|world|average_loss|dist_")
"""What a call is named that makes one value of those of all ranks."""
_MAKES = re.compile(
    r"(?:\w*criterion|loss_fn|loss_func|loss_function|\w*cross_entropy|mse_loss|nll_loss|l1_loss"
    r"|\w*model|\w*engine|net|ddp|compute_loss)"
)
"""What a call is named that gives the loss of this rank's own samples."""
_CAUGHT = re.compile(r"RuntimeError|OutOfMemoryError|OOM")


@rule(
    "script.uneven-pass", severity="hang", raised_by="nobody",
    evidence="torch 2.13, run on two ranks; PyTorch 2.13 documentation: DistributedDataParallel",
)  # fmt: skip
def uneven(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A backward pass or a barrier that a rank leaves out by its own loss or its own exception."""
    for script in scripts(files):
        if script.by_framework or not (script.called(DDP, FSDP) or script.deepspeed):
            continue
        for call in script.calls:
            if not _meets(script, call):
                continue
            if (found := _left_out(script, call)) is not None:
                at, why = found
                message = (
                    f"{why}: a rank that leaves {call.method} out in line {call.node.lineno} lets the others "
                    "wait for ever, or meets them one step later with other gradients."
                )
                fix = "Let all decide alike: all_reduce the flag first, or stop the job."
                yield Hit(script.path, at, message, fix)


def _meets(script: Script, call: Call) -> bool:
    """Whether all ranks meet in a call: a backward pass, or a barrier."""
    if call.method == "backward":
        return call.owner in script.engines or call.owner.endswith("loss")
    return call.name == "torch.distributed.barrier"


def _left_out(script: Script, call: Call) -> tuple[Position, str] | None:
    """What makes one rank pass a call by, and in words; None where nothing is seen to."""
    function = function_of(call) or script.python.tree
    own = _own_losses(script, function)
    for test, _ in guards(call):
        if _is_own(test.test, own):
            return script.python.at(test.test), f"`{ast.unparse(test.test)}` differs from rank to rank"
    loop = next((node for node in call.around if isinstance(node, ast.For | ast.While)), None)
    for node in loop.body if loop is not None and call.method == "backward" else ():
        above = node.lineno < call.node.lineno
        if isinstance(node, ast.If) and _leaves(node, above=above) and _is_own(node.test, own):
            return script.python.at(node.test), f"`{ast.unparse(node.test)}` differs from rank to rank"
    for each in call.around if loop is not None and call.method == "backward" else ():
        if each is loop:
            return None
        if isinstance(each, ast.Try) and (handler := _goes_on(each)) is not None:
            at = Position(handler.lineno, handler.col_offset + 1)
            return at, "one rank may run out of memory while the others don't"
    return None


def _leaves(node: ast.If, *, above: bool) -> bool:
    """Whether a condition ends the pass before the call, or the loop."""
    last = node.body[-1]
    return isinstance(last, ast.Break) or (above and isinstance(last, ast.Continue))


def _own_losses(script: Script, function: ast.AST) -> set[str]:
    """Names of losses that a function computes of its own samples and never puts together with other ranks'."""
    own: set[str] = set()
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.endswith("loss") and _of_one_rank(script, node.value):
                own.add(name)
        if isinstance(node, ast.Call) and _SHARES.search(ast.unparse(node.func)):
            shared |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return own - shared


def _of_one_rank(script: Script, value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr == "loss"
    if not isinstance(value, ast.Call):
        return False
    name = script.name(value.func).rpartition(".")[2]
    return bool(_MAKES.fullmatch(name)) or (name == "mean" and _of_one_rank(script, _inner(value)))


def _inner(value: ast.Call) -> ast.expr:
    return value.func.value if isinstance(value.func, ast.Attribute) else value.func


def _is_own(test: ast.expr, own: set[str]) -> bool:
    """Whether a condition compares such a loss, or asks whether it is a number; `is None` is alike everywhere."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        return False
    text = ast.unparse(test)
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    asks = isinstance(test, ast.Compare) or re.search(r"\bis(?:nan|inf|finite)\(", text) is not None
    return asks and bool(names & own) and not _SHARES.search(text)


def _goes_on(node: ast.Try) -> ast.ExceptHandler | None:
    """The handler that takes an exception of this rank's own and goes on with the next pass."""
    for handler in node.handlers:
        kind = ast.unparse(handler.type) if handler.type is not None else ""
        calls = (ast.unparse(each.func) for each in ast.walk(handler) if isinstance(each, ast.Call))
        if _CAUGHT.search(kind) and not any(_SHARES.search(name) for name in calls):
            parts = [each for part in handler.body for each in ast.walk(part)]
            if any(isinstance(each, ast.Continue) for each in parts) or isinstance(handler.body[-1], ast.Pass):
                return handler
    return None
