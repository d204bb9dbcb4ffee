"""Groups of parameters that an optimizer is handed, and parameters that stand in two of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_LISTS = ("parameters", "named_parameters")
_RAISES = "ValueError, some parameters appear in more than one parameter group."


@rule("script.parameter-twice", severity="error", raised_by="torch", evidence="torch 2.13, run")
def parameter_twice(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A parameter that is put into two groups of one optimizer."""
    for script in scripts(files):
        for node in script.nodes if ".append(" in script.python.text and "params" in script.python.text else ():
            if isinstance(node, ast.FunctionDef):
                yield from _twice_in_a_loop(script, node)
        for node in script.nodes:
            if isinstance(node, ast.List) and len(node.elts) > 1:
                yield from _part_beside_whole(script, node)


def _twice_in_a_loop(script: Script, function: ast.FunctionDef) -> Iterator[Hit]:
    """A loop over parameters that appends one by a condition, and once more in each branch behind it."""
    grouped = set(_grouped(function))
    for loop in (each for each in function.body if isinstance(each, ast.For)):
        over = loop.iter
        if not isinstance(over, ast.Call) or script.name(over.func).rpartition(".")[2] not in _LISTS:
            continue
        target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
        name = target.id if isinstance(target, ast.Name) else ""
        before: dict[str, ast.stmt] = {}
        for node in loop.body:
            every = _in_each_branch(node, name)
            others = {each: at for each, at in before.items() if every and each not in every}
            if every and every <= grouped and (first := next((n for n in others if n in grouped), "")):
                both = " or ".join(sorted(every))
                message = f"what goes into {first} here goes into {both} in line {node.lineno} too: {_RAISES}"
                fix = "Write elif in the second place, or continue here."
                yield Hit(script.path, script.python.at(others[first]), message, fix)
            for held, at in _appended(node, name):
                before.setdefault(held, at)


def _grouped(function: ast.FunctionDef) -> Iterator[str]:
    """Lists that are the `params` of a group."""
    for node in ast.walk(function):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == "params" and isinstance(value, ast.Name):
                yield value.id


def _appended(node: ast.stmt, name: str) -> Iterator[tuple[str, ast.stmt]]:
    """The lists that a statement may append a name to and go on; not those of a branch that ends the pass."""
    if isinstance(node, ast.If):
        for body in (node.body, node.orelse):
            if body and not isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise):
                for each in body:
                    yield from _appended(each, name)
    elif (held := _list_of(node, name)) is not None:
        yield held, node


def _in_each_branch(node: ast.stmt, name: str) -> set[str]:
    """The lists to one of which a statement appends a name in any case; none where a branch doesn't."""
    if not isinstance(node, ast.If):
        held = _list_of(node, name)
        return {held} if held is not None else set()
    found = set[str]()
    for body in (node.body, node.orelse):
        inner = set[str]().union(*(_in_each_branch(each, name) for each in body))
        if not inner:
            return set()
        found |= inner
    return found


def _list_of(node: ast.stmt, name: str) -> str | None:
    """`decay` of `decay.append(p)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
        return None
    alone = len(call.args) == 1 and isinstance(call.args[0], ast.Name) and call.args[0].id == name
    return ast.unparse(call.func.value) if alone else None


def _part_beside_whole(script: Script, node: ast.List) -> Iterator[Hit]:
    """`{"params": model.parameters()}` beside `{"params": model.head.parameters()}`."""
    owners: list[tuple[str, ast.expr]] = []
    for each in node.elts:
        for key, value in zip(each.keys, each.values, strict=True) if isinstance(each, ast.Dict) else ():
            given = isinstance(key, ast.Constant) and key.value == "params"
            if given and isinstance(value, ast.Call) and script.name(value.func).endswith(".parameters"):
                owners.append((script.name(value.func).removesuffix(".parameters"), value))
    for owner, at in owners:
        wider = (other for other, value in owners if value is not at and owner.startswith(f"{other}."))
        if whole := next(wider, ""):
            message = f"the parameters of {owner} are among those of {whole} beside: {_RAISES}"
            yield Hit(script.path, script.python.at(at), message, f"Leave them out of the group of {whole}.")
