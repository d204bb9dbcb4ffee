"""What `args.NAME` is in a script: what the command that starts it passes, or else the default of its parser."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import Call, Script

_DEEP = 4
"""Functions through which a value may be handed."""
_PARSES = ("parse_args", "parse_args_into_dataclasses", "parse_known_args")
_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "": str}


def value_of(
    files: FileSet, script: Script, node: ast.expr | None, around: Sequence[ast.AST] = (),
    world: int | None = None,
) -> Any:  # fmt: skip
    """The value of a literal, of a name that is bound to one, or of an argument; None where it isn't told.

    Args:
        around: what the expression stands in, from the inside out: a parameter of a function is then what all of
            the script's calls of it hand over alike.
        world: what get_world_size() is, where that is known.
    """
    return _value(files, script, node, around, _DEEP, world)


def _value(
    files: FileSet, script: Script, node: ast.expr | None, around: Sequence[ast.AST], deep: int, world: int | None
) -> Any:
    found = script.bound(node)
    if isinstance(found, ast.Constant):
        return found.value
    if isinstance(found, ast.Call) and script.name(found.func) == "torch.distributed.get_world_size":
        return None if found.args or found.keywords else world
    if isinstance(found, ast.BinOp) and deep > 0:
        left, right = (_value(files, script, each, around, deep - 1, world) for each in (found.left, found.right))
        reckon = _OPERATORS.get(type(found.op))
        whole = type(left) is int and type(right) is int and right != 0
        return reckon(left, right) if reckon is not None and whole else None
    if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name):
        return _of_argument(files, script, found.value.id, found.attr)
    if isinstance(node, ast.Name) and found is None and deep > 0:
        return _of_parameter(files, script, node.id, around, deep, world)
    return None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _of_parameter(
    files: FileSet, script: Script, name: str, around: Sequence[ast.AST], deep: int, world: int | None
) -> Any:
    """What every call of the function around hands over under a parameter's name."""
    place = next((at for at, each in enumerate(around) if isinstance(each, ast.FunctionDef)), None)
    function = around[place] if place is not None else None
    if place is None or not isinstance(function, ast.FunctionDef) or name in _stored(function):
        return None
    outer = around[place + 1] if len(around) > place + 1 else None
    called = outer.name if isinstance(outer, ast.ClassDef) and function.name == "__init__" else function.name
    if isinstance(outer, ast.ClassDef) and function.name != "__init__":
        return None
    parameters = [each.arg for each in function.args.args][1 if isinstance(outer, ast.ClassDef) else 0 :]
    if name not in parameters:
        return None
    at, default = parameters.index(name), _default(function, name)
    values = []
    for call in script.called(called):
        if call.unpacks or any(isinstance(each, ast.Starred) for each in call.node.args):
            return None
        given = call.argument(name, at)
        handed = default if given is None else given
        values.append(_value(files, script, handed, call.around, deep - 1, world))
    return values[0] if values and all(each == values[0] for each in values) else None


def _stored(function: ast.FunctionDef) -> set[str]:
    nodes = (each for each in ast.walk(function) if isinstance(each, ast.Name))
    return {each.id for each in nodes if isinstance(each.ctx, ast.Store)}


def _default(function: ast.FunctionDef, name: str) -> ast.expr | None:
    names = [each.arg for each in function.args.args]
    pairs = zip(reversed(names), reversed(function.args.defaults), strict=False)
    return dict(pairs).get(name)


def _of_argument(files: FileSet, script: Script, owner: str, name: str) -> Any:
    """`args.NAME`, where `args` is what a parser returns."""
    if owner not in _arguments(script) or _changed(script, name):
        return None
    options = [call for call in script.methods("add_argument") if name in _names(call)]
    if len(options) == 1 and options[0].keyword("action") is None and options[0].keyword("nargs") is None:
        return _of_option(files, script, options[0], name)
    return None if options else _of_field(files, script, name)


def _arguments(script: Script) -> set[str]:
    """Names that hold what a parser returns, in the whole file."""
    held: set[str] = set()
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            parses = isinstance(function, ast.Attribute) and function.attr in _PARSES
            makes = isinstance(function, ast.Name) and function.id in script.functions and any(
                isinstance(each, ast.Attribute) and each.attr in _PARSES
                for each in ast.walk(script.functions[function.id])
            )
            if parses or makes:
                parts = (each for target in node.targets for each in ast.walk(target))
                held |= {each.id for each in parts if isinstance(each, ast.Name)}
    return held


def _changed(script: Script, name: str) -> bool:
    """Whether the script sets the attribute, or the parser's defaults, itself."""
    return "set_defaults" in script.python.text or any(
        isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name) and node.value.id != "self"
        for node in script.nodes
    )  # fmt: skip


def _names(call: Call) -> set[str]:
    """The attributes that an add_argument makes."""
    dest = call.keyword("dest")
    if isinstance(dest, ast.Constant):
        return {str(dest.value)}
    names = [str(each.value) for each in call.node.args if isinstance(each, ast.Constant)]
    long = [each for each in names if each.startswith("--")] or names
    return {long[0].lstrip("-").replace("-", "_")} if long else set()


def _of_option(files: FileSet, script: Script, option: Call, name: str) -> Any:
    kind = option.keyword("type")
    make = _TYPES.get(ast.unparse(kind) if kind is not None else "")
    given = list(_given(files, script, name))
    if make is None or (option.keyword("required") is not None and not given):
        return None
    return _settled(given, make, script.constant(option.keyword("default")))


def _of_field(files: FileSet, script: Script, name: str) -> Any:
    """The same of a dataclass that HfArgumentParser reads."""
    fields = [
        line for node in script.python.tree.body if isinstance(node, ast.ClassDef) for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name
    ]  # fmt: skip
    if len(fields) != 1 or all(call.method != "parse_args_into_dataclasses" for call in script.every):
        return None
    made = fields[0].value
    if isinstance(made, ast.Call):
        made = next((each.value for each in made.keywords if each.arg == "default"), None)
    default = made.value if isinstance(made, ast.Constant) else None
    make: Callable[[str], Any] = type(default) if type(default) in (int, float) else str
    return _settled(list(_given(files, script, name)), make, default)


def _given(files: FileSet, script: Script, name: str) -> Iterator[str | None]:
    """What each command that starts the script says; None where it isn't told, empty where it says nothing."""
    for _, command, started in launched(files):
        if started is script:
            yield _said(command, name)


def _said(command: CommandLine, name: str) -> str | None:
    spelled = (f"--{name}", f"--{name.replace('_', '-')}")
    flags = [flag for flag in command.arguments.flags if flag.name in spelled]
    if flags:
        values = flags[-1].values
        return values[0] if len(values) == 1 and is_told(values[0]) else None
    return "" if command.arguments.complete else None


def _settled(given: list[str | None], make: Callable[[str], Any], default: Any) -> Any:
    """The one value that all commands lead to."""
    if None in given:
        return None
    try:
        values = [make(each) if each else default for each in given] or [default]
    except ValueError:
        return None
    return values[0] if all(each == values[0] for each in values) else None
