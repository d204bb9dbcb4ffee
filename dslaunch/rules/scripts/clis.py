"""Command lines that click, typer, fire or tyro read, and whether they take an option that a launcher adds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from dslaunch.rules.scripts.tree import Call, Script

_OWN_WAYS = re.compile(
    r"sys\.argv|ignore_unknown_options|token_normalize_func|context_settings|return_unknown_args|parse_known_args"
)
"""What a script may take an unknown option out by."""


def refuses(script: Script, name: str) -> Iterator[tuple[ast.expr, str]]:
    """Where a script's command line is read by a library that stops at `--name=N`, with the library.

    click and typer make `--some-name` of some_name, and take no other spelling; fire and tyro take both.
    """
    if f"--{name}" in _strings(script) or _OWN_WAYS.search(script.python.text):
        return
    for call in script.calls:
        library = _LIBRARIES.get(call.name, "")
        given = call.node.args[0] if len(call.node.args) == 1 and not call.node.keywords else None
        if call.name == "typer.Typer":
            found = _is_app(script, call)
        elif library == "click":
            found = _is_run(script, call)
        elif library == "fire":
            found = given is not None and _takes(script, given, name) is False
        elif library == "tyro":
            found = isinstance(given, ast.Name) and name not in script.python.text
        else:
            found = library == "typer" and given is not None
        if found:
            yield call.node, library


_LIBRARIES: Mapping[str, str] = {
    "click.command": "click", "click.group": "click", "fire.Fire": "fire", "tyro.cli": "tyro",
    "typer.run": "typer", "typer.Typer": "typer",
}  # fmt: skip


def _strings(script: Script) -> set[str]:
    """The words of all strings: click takes several names in one, `--on/--off`."""
    strings = (each.value for each in script.nodes if isinstance(each, ast.Constant))
    return {word for each in strings if isinstance(each, str) for word in re.split(r"[\s/,=]+", each)}


def _keywords(call: Call) -> set[str | None]:
    return {each.arg for each in call.node.keywords}


def _is_run(script: Script, call: Call) -> bool:
    """Whether the function under a decorator is called with the words of the command: `main()`."""
    function = call.around[0] if call.around else None
    if not isinstance(function, ast.FunctionDef) or call.node not in function.decorator_list:
        return False
    return "cls" not in _keywords(call) and _is_started(script, function.name)


def _is_started(script: Script, name: str) -> bool:
    calls = script.called(name)
    return bool(calls) and not any(
        each.node.args or not _keywords(each) <= {"obj", "prog_name", "standalone_mode"} for each in calls
    )


def _is_app(script: Script, call: Call) -> bool:
    target = call.around[0] if call.around else None
    name = ast.unparse(target.targets[0]) if isinstance(target, ast.Assign) else ""
    return _is_started(script, name)


def _takes(script: Script, given: ast.expr, name: str) -> bool | None:
    """Whether a function or class of the file takes an argument; None where that isn't told."""
    if not isinstance(given, ast.Name) or given.id in script.bound_at:
        return None
    function = script.functions.get(given.id)
    if function is not None:
        return None if function.decorator_list else _has(function.args, name)
    top = script.python.tree.body
    classes = [node for node in top if isinstance(node, ast.ClassDef) and node.name == given.id]
    if len(classes) != 1 or classes[0].bases or classes[0].decorator_list:
        return None
    methods = [each for each in classes[0].body if isinstance(each, ast.FunctionDef)]
    return None if any(_has(each.args, name) for each in methods) else False


def _has(taken: ast.arguments, name: str) -> bool:
    names = {each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    return name in names or taken.kwarg is not None or taken.vararg is not None
