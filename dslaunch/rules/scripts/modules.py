"""The files that a started script imports from its own folder: what they define, and what is taken from them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from dslaunch.files.fileset import FileSet
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.tree import Script, scripts

_OPEN = ("globals()", "exec(", "sys.modules[", "__getattr__(")
"""What gives a module names that its text doesn't show."""
FRAMEWORKS = frozenset({"torch", "deepspeed", "transformers", "accelerate", "lightning", "trl"})
_MOVES_PATH = ("sys.path.insert", "sys.path =", "sys.path[")


@dataclass(frozen=True)
class Module:
    """One file, as a started script finds it."""

    script: Script
    name: str
    """As it is imported, such as `models.vla`; empty for the script that is started."""
    is_package: bool = False

    @cached_property
    def names(self) -> frozenset[str] | None:
        """What it defines at its top; None where its text doesn't tell all, or modules lie in its folder."""
        open_ended = any(each in self.script.python.text for each in _OPEN)
        if open_ended or self.script.python.problems or self.is_package:
            return None
        found = set[str]()
        for node in top(self.script.python.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                return None
            found |= set(bound_by(node))
        for each in self.script.nodes:
            if isinstance(each, ast.Global):
                found |= set(each.names)
        return frozenset(found)

    @cached_property
    def definitions(self) -> Mapping[str, ast.FunctionDef | ast.ClassDef]:
        """The functions and classes at its top to whose names nothing else is bound."""
        bound = Counter(each for node in top(self.script.python.tree) for each in bound_by(node))
        for each in self.script.nodes:
            if isinstance(each, ast.Global):
                bound.update(each.names)
        return {
            node.name: node for node in self.script.python.tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and bound[node.name] == 1
        }  # fmt: skip


def top(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run as a file is imported, those in branches too."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, part, ()):
            if isinstance(node, ast.stmt):
                yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from top(node)


def bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that one statement binds, without the statements within."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif not isinstance(node, ast.If | ast.Try):
        nodes = [node.target] if isinstance(node, ast.For | ast.AsyncFor) else _own(node)
        for each in nodes:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id


def _own(node: ast.stmt) -> list[ast.AST]:
    """What a statement holds beside the statements within."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return [] if isinstance(node, ast.While) else [node]


@dataclass(frozen=True)
class Tree:
    """All Python files, and the folders that are known."""

    files: Mapping[PurePosixPath, Script]
    folders: frozenset[PurePosixPath]


@dataclass(frozen=True)
class Folder:
    """What is found by the imports of a script that is started: its folder goes before all packages."""

    root: PurePosixPath
    tree: Tree
    kept: dict[str, Module | None] = field(default_factory=dict)

    def find(self, name: str) -> Module | None:
        """The module of this full name, as far as it is sure to be one of these files."""
        if name not in self.kept:
            self.kept[name] = self._find(name)
        return self.kept[name]

    def _find(self, name: str) -> Module | None:
        files, place = self.tree.files, self.root.joinpath(*name.split("."))
        packages = [self.root.joinpath(*name.split(".")[:size]) for size in range(1, name.count(".") + 1)]
        if not all(each / "__init__.py" in files for each in packages):
            return None
        if place / "__init__.py" in files:
            return Module(files[place / "__init__.py"], name, is_package=True)
        file = place.with_name(f"{place.name}.py")
        return Module(files[file], name) if file in files and place not in self.tree.folders else None

    def imported(self, module: Module, node: ast.ImportFrom) -> Module | None:
        """The module that `from NAME import ...` in another one means; None where it is none of the files."""
        if not node.level:
            return self.find(node.module or "") if node.module else None
        parts = module.name.split(".")
        kept = len(parts) - node.level + module.is_package
        if not module.name or kept <= 0:
            return None
        return self.find(".".join([*parts[:kept], *([node.module] if node.module else [])]))


def started(files: FileSet) -> Iterator[tuple[Script, Folder, bool]]:
    """Scripts that are started as files, with what they import from, and whether a command starts them.

    A script with a main guard is one, where no package is around it and no command starts a module.
    """
    commands = [(command, script) for _, command, script in launched(files)]
    by_file = {script.path for command, script in commands if not command.module}
    modules = any(command.module for _, command in files.launches())
    every = {PurePosixPath(script.path): script for script in scripts(files)}
    known = {PurePosixPath(each) for each in files.folders} | {each for path in every for each in path.parents}
    tree = Tree(every, frozenset(known))
    for path, script in every.items():
        if any(each in script.python.text for each in _MOVES_PATH):
            continue
        guarded = "__main__" in script.python.text and path.parent / "__init__.py" not in every
        trains = any(name.partition(".")[0] in FRAMEWORKS for name in script.imports.values())
        if script.path in by_file or (guarded and trains and not modules):
            yield script, Folder(path.parent, tree), script.path in by_file


def modules_of(files: FileSet) -> Iterator[tuple[Module, Folder]]:
    """What the scripts that are started reach, each file once."""
    seen: set[str] = set()
    for script, folder, _ in started(files):
        for module in reached(script, folder):
            if module.script.path not in seen:
                seen.add(module.script.path)
                yield module, folder


def reached(script: Script, folder: Folder) -> Iterator[Module]:
    """The script, and the files that it imports as it starts, those that these import too."""
    waiting, seen = [Module(script, "")], {script.path}
    while waiting:
        module = waiting.pop()
        yield module
        for node in sure_imports(module.script):
            found = [folder.imported(module, node)] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                found = [folder.find(alias.name) for alias in node.names]
            for each in found:
                if each is not None and each.script.path not in seen:
                    seen.add(each.script.path)
                    waiting.append(each)


def sure_imports(script: Script) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run in any case, and that nothing catches the error of."""
    for node in script.python.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def homes(module: Module, folder: Folder) -> dict[str, tuple[Module, str]]:
    """Names of a file that nothing else binds: the module that each is of, and its name there.

    That name is empty where the module itself is meant.
    """
    script, found = module.script, dict[str, tuple[Module, str]]()
    for node in script.python.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = (module, node.name)
        elif isinstance(node, ast.ImportFrom) and (home := folder.imported(module, node)) is not None:
            found |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            modules = {alias.asname or alias.name: folder.find(alias.name) for alias in node.names}
            found |= {name: (each, "") for name, each in modules.items() if each is not None}
    outer: set[ast.AST] = set(script.python.tree.body)
    taken = set(script.bound_at)
    for each in script.nodes if found else ():
        if isinstance(each, ast.arg):
            taken.add(each.arg)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef) and each not in outer:
            taken.add(each.name)
    return {name: home for name, home in found.items() if name not in taken}


def home_of(here: dict[str, tuple[Module, str]], called: ast.expr | None) -> tuple[Module, str] | None:
    """Where what is called is defined: `VLA(...)`, or `model.VLA(...)`."""
    if isinstance(called, ast.Name):
        found = here.get(called.id)
        return found if found is not None and found[1] else None
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        found = here.get(called.value.id)
        return (found[0], called.attr) if found is not None and not found[1] else None
    return None
