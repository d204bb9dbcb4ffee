"""Which ranks get to a call of a training script: the conditions around it, and those about a rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from dslaunch.rules.scripts.tree import Call, is_none

COLLECTIVES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
})  # fmt: skip
"""What torch.distributed does on all ranks of a group."""
_GROUP_AT: Mapping[str, int] = {
    "barrier": 0, "monitored_barrier": 0, "gather": 3, "gather_object": 3, "reduce": 3, "reduce_scatter": 3,
    "reduce_scatter_tensor": 3, "scatter": 3, "scatter_object_list": 3, "all_to_all_single": 4,
}  # fmt: skip
"""The place of the group among the arguments; 2 for the others. The same in torch 2.4 and 2.13."""
OF_ACCELERATE = frozenset(
    {"wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"}
)
"""What an Accelerator does on all ranks."""
OF_CHECKPOINTS = tuple(f"torch.distributed.checkpoint.{each}" for each in ("save", "async_save", "load"))
"""What all ranks do for a distributed checkpoint, unless they are told not to by `no_dist`."""
SEES = re.compile(r"exists\(|is_?file\(|is_?dir\(")
"""Questions whether a file is there."""
_FIRST = re.compile(
    r"\brank\b|\b(?:LOCAL_|GLOBAL_|WORLD_)?RANK\b|local_rank|global_rank|get_rank\(|process_index|is_main|is_master"
    r"|main_process|master_process|process_zero"
)
_FIRST_RANK: Mapping[tuple[type[ast.cmpop], int | None], bool] = {
    (ast.Eq, 0): True, (ast.Lt, 1): True, (ast.LtE, 0): True,
    (ast.NotEq, 0): False, (ast.Gt, 0): False, (ast.GtE, 1): False,
}  # fmt: skip
"""Comparisons of a rank that hold for the first one alone, or for all the others."""


def guards(call: Call) -> Iterator[tuple[ast.If, bool]]:
    """The `if` statements around a call within its function, and whether it stands in the first branch."""
    child: ast.AST = call.node
    for node in call.around:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and child is not node.test:
            yield node, child in node.body
        child = node


def of_a_group(call: Call) -> bool:
    """Whether a collective of torch.distributed is given a group, which other ranks needn't belong to."""
    given = call.argument("group", _GROUP_AT.get(call.method, 2))
    if given is None or is_none(given) or ast.unparse(given).endswith("WORLD"):
        return False
    return call.owner in ("torch.distributed", "deepspeed.comm")


def function_of(call: Call) -> ast.AST | None:
    """The function that a call stands in; None at the top of the file."""
    return call.function


def on_one_rank(test: ast.expr) -> bool | None:
    """Whether a condition holds on one rank (True), on all others (False), or is about something else (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = on_one_rank(test.operand)
        if inner is None:
            return True if _FIRST.search(ast.unparse(test.operand)) and _is_rank(test.operand) else None
        return not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and _is_rank(test.left):
        right = test.comparators[0]
        if isinstance(right, ast.List | ast.Tuple) and isinstance(test.ops[0], ast.In | ast.NotIn):
            values = {ast.unparse(each) for each in right.elts}
            return isinstance(test.ops[0], ast.In) if "0" in values and values <= {"-1", "0"} else None
        number = right.value if isinstance(right, ast.Constant) and type(right.value) is int else None
        found = _FIRST_RANK.get((type(test.ops[0]), number))
        if found is not None:
            return found
    text = ast.unparse(test)
    if isinstance(test, ast.Call | ast.Name | ast.Attribute) and re.search(
        r"is_(?:main|master)|(?:main|master)_process$|is_(?:world|local)_process_zero"
        r"|is_(?:\w+_)?rank_?(?:0|zero)\b|is_global_zero\b", text,
    ):
        return True
    return None


def _is_rank(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and bool(_FIRST.search(text))


def one_rank_guard(call: Call) -> bool | None:
    """True: only the first rank gets to the call; False: all but it; None: no such condition is around it."""
    for node, first_branch in guards(call):
        if first_branch and _first_or_at_times(node.test):
            return True
        for told in map(on_one_rank, _parts(node, call) if first_branch else [node.test]):
            if told is not None:
                return told if first_branch else not told
    return None


def _first_or_at_times(test: ast.expr) -> bool:
    """Whether it holds on the first rank always, on the others in each N-th step: `rank == 0 or step % 9 == 0`."""
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.Or):
        return False
    first = [bool(on_one_rank(each)) for each in test.values]
    others = [each for each, is_first in zip(test.values, first, strict=True) if not is_first]
    return any(first) and bool(others) and all(_at_times(each) or _without_ranks(each) for each in others)


def _at_times(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.BinOp) and isinstance(test.left.op, ast.Mod)


def _without_ranks(test: ast.expr) -> bool:
    """Whether it holds only in a run that has no ranks, where nobody waits: `not dist.is_initialized()`."""
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return negated and re.search(r"is_(?:initialized|available|distributed|dist)\b", ast.unparse(test)) is not None


def _parts(node: ast.If | ast.IfExp, call: Call) -> list[ast.expr]:
    """What has to hold for a call in the first branch; the test alone where the other branch calls the same."""
    if not isinstance(node.test, ast.BoolOp) or not isinstance(node.test.op, ast.And):
        return [node.test]
    others = (each for part in node.orelse for each in ast.walk(part)) if isinstance(node, ast.If) else ()
    names = (
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in others if isinstance(each, ast.Attribute | ast.Name)
    )  # fmt: skip
    return [node.test] if call.method in names else node.test.values
