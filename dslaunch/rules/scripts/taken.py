"""What a started script takes from the files beside it, and what these don't have or don't take."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath

from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.made import Models, forward_of
from dslaunch.rules.scripts.modules import (
    FRAMEWORKS,
    Folder,
    Module,
    home_of,
    homes,
    modules_of,
    reached,
    started,
    sure_imports,
)
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_RAN = "CPython 3.11, run"


@rule("script.import", severity="error", raised_by="python", evidence=_RAN)
def imports(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A name that is imported from a file beside the script, and that the file doesn't define."""
    seen = set()
    for script, folder, by_command in started(files):
        for module in reached(script, folder):
            for node in sure_imports(module.script):
                for found in _lacking(module, folder, node, by_command=by_command):
                    if found not in seen:
                        seen.add(found)
                        yield found


def _lacking(
    module: Module, folder: Folder, node: ast.Import | ast.ImportFrom, *, by_command: bool
) -> Iterator[Hit]:
    at = module.script.python.at(node)
    if isinstance(node, ast.Import):
        for alias in node.names:
            found = folder.find(alias.name)
            for used in _attributes(module.script, alias) if found is not None else ():
                if found is not None and _lacks(found, used.attr):
                    message = f"{_file(found)} has no {used.attr}: AttributeError.{_near(found, used.attr)}"
                    yield Hit(module.script.path, module.script.python.at(used), message, _fix(found, used.attr))
        return
    if node.level and not module.name:
        if by_command and "__package__" not in module.script.python.text:
            message = "a relative import in the file that is started: ImportError, no known parent package."
            fix = f"Write `from {node.module or 'NAME'} import ...`, or start it with -m PACKAGE.MODULE."
            yield Hit(module.script.path, at, message, fix)
        return
    found = folder.imported(module, node)
    for alias in node.names if found is not None else ():
        if found is not None and _lacks(found, alias.name):
            message = f"{_file(found)} defines no {alias.name}: ImportError.{_near(found, alias.name)}"
            yield Hit(module.script.path, at, message, _fix(found, alias.name))


def _lacks(module: Module, name: str) -> bool:
    return module.names is not None and name not in module.names and name != "*" and not name.startswith("__")


def _near(module: Module, name: str) -> str:
    return nearest(name, sorted(module.names or ()))


def _file(module: Module) -> str:
    return module.script.path.rpartition("/")[2]


def _fix(module: Module, name: str) -> str:
    return f"Correct the name, or rename {_file(module)} if another module of that name has {name}."


def _attributes(script: Script, alias: ast.alias) -> Iterator[ast.Attribute]:
    """`module.NAME` of an imported module, where nothing else has its name or sets what it holds."""
    name = alias.asname or alias.name
    if "." in name or name in script.bound_at or name in script.parameters:
        return
    found = [
        node for node in script.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    ]  # fmt: skip
    yield from found if all(isinstance(node.ctx, ast.Load) for node in found) else ()


@rule("script.shadowed-module", severity="error", raised_by="python", evidence=f"torch 2.13 on {_RAN}")
def shadowed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A file beside the script that has the name of a module which torch imports, and is found in its place."""
    seen = set()
    for script, folder, by_command in started(files):
        imported = {name.partition(".")[0] for name in script.imports.values()} & FRAMEWORKS
        for name in sorted(_OF_TORCH | imported) if imported else ():
            found = folder.find(name)
            vendored = found is not None and found.is_package and name in imported
            if found is None or vendored or found.script.path in seen:
                continue
            seen.add(found.script.path)
            message = (
                f"python finds this file where {name} is imported: a script's own folder goes first, "
                "and it ends in an ImportError or AttributeError."
            )
            severity: Severity = "error"
            if not by_command and _is_of_package(files, found.script.path):
                severity = "info"
            yield Hit(found.script.path, Position(1, 1), message, "Rename the file.", severity)


def _is_of_package(files: FileSet, path: str) -> bool:
    """Whether a file among them imports from the folder of `path` by a package's name: `oumi.utils.x`."""
    around = PurePosixPath(path).parent.parts
    named = {".".join(around[at:]) for at in range(len(around) - 1)}
    return any(
        any(name == each or name.startswith(f"{each}.") for each in named)
        for script in scripts(files) for name in script.imports.values()
    )  # fmt: skip


_OF_TORCH = frozenset({
    "ast", "asyncio", "base64", "bisect", "collections", "concurrent", "contextlib", "contextvars", "copy",
    "copyreg", "ctypes", "dataclasses", "datetime", "dis", "email", "enum", "fnmatch", "functools", "glob",
    "heapq", "http", "importlib", "inspect", "json", "keyword", "linecache", "locale", "logging", "math",
    "mmap", "multiprocessing", "numbers", "numpy", "opcode", "operator", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "reprlib", "select", "selectors", "signal", "socket", "ssl",
    "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "timeit", "token", "tokenize",
    "traceback", "types", "typing", "typing_extensions", "unittest", "urllib", "warnings", "weakref",
    "zlib",
})  # fmt: skip
"""Each was put beside a script that imports torch 2.13, as a file with a function of its own: it didn't start."""


@rule("script.signature", severity="error", raised_by="python", evidence=_RAN)
def signature(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A function or class of the script's own files, called with arguments that it doesn't take."""
    for module, folder in modules_of(files):
        here, models = homes(module, folder), Models(module.script)
        for call in module.script.calls:
            if _is_caught(call):
                continue
            home = home_of(here, call.node.func)
            made = models.made(call.node.func) if home is None else None
            wrong = _wrong(*home, call) if home is not None else _forward(home_of(here, made), call)
            if wrong:
                found = module.script.hit(call, wrong, "Call it as it is defined.")
                yield replace(found, severity="info") if _is_idle(module.script, call) else found


def _forward(home: tuple[Module, str] | None, call: Call) -> str:
    """What a call of a model gets wrong of its forward: `net(images=x)`."""
    found = forward_of(home)
    if found is None or found[1].decorator_list:
        return ""
    return _judged(f"{found[0].name}.forward", _behind_self(found[1].args), call)


def _is_idle(script: Script, call: Call) -> bool:
    """Whether a call stands in a function of the file that nothing in the file mentions."""
    top = script.python.tree.body
    around = [node for node in call.around if isinstance(node, ast.FunctionDef) and node in top]
    return any(len(re.findall(rf"\b{node.name}\b", script.python.text)) == 1 for node in around)


def _is_caught(call: Call) -> bool:
    return any(isinstance(node, ast.Try) for node in call.around)


def _wrong(module: Module, name: str, call: Call) -> str:
    """What a call gets wrong; empty where it is right, or where that isn't told."""
    return _judged(name, _arguments(module.definitions.get(name)), call)


def _judged(name: str, arguments: ast.arguments | None, call: Call) -> str:
    """What a call gets wrong of what a function takes; empty where nothing, or where that isn't told."""
    if arguments is None:
        return ""
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    alone = [each.arg for each in arguments.kwonlyargs]
    given = [each.arg for each in call.node.keywords if each.arg is not None]
    spread = any(isinstance(each, ast.Starred) for each in call.node.args)
    unknown = [each for each in given if each not in {*names, *alone}] if arguments.kwarg is None else []
    if unknown:
        free = [each for each in (*names[len(call.node.args) :], *alone) if each not in given]
        return f"{name} takes no {unknown[0]}: TypeError.{nearest(unknown[0], free)}"
    if spread:
        return ""
    count = len(call.node.args)
    if count > len(names) and arguments.vararg is None:
        return f"{name} takes {len(names)} arguments by their places, and gets {count}: TypeError."
    twice = [each for each in given if each in names[:count]]
    if twice:
        return f"{name} gets {twice[0]} twice, by its place and by its name: TypeError."
    bare = names[: len(names) - len(arguments.defaults)]
    held = zip(alone, arguments.kw_defaults, strict=True)
    bare += [each for each, default in held if default is None]
    missing = [each for each in bare if each not in given and each not in names[:count]]
    return f"{name} wants {listed(missing)} too: TypeError." if missing and not call.unpacks else ""


def _arguments(made: ast.FunctionDef | ast.ClassDef | None) -> ast.arguments | None:
    """What a function takes, or a class's own __init__ behind self; None where something else may decide."""
    if made is None or made.decorator_list:
        return None
    if isinstance(made, ast.FunctionDef):
        return made.args
    functions = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
    init = functions.get("__init__")
    if made.keywords or "__new__" in functions or init is None or init.decorator_list:
        return None
    return _behind_self(init.args)


def _behind_self(taken: ast.arguments) -> ast.arguments | None:
    if taken.posonlyargs or not taken.args:
        return None
    return ast.arguments(
        taken.posonlyargs, taken.args[1:], taken.vararg, taken.kwonlyargs, taken.kw_defaults, taken.kwarg,
        taken.defaults,
    )  # fmt: skip


