"""Keys that a script looks up: in a configuration that its command names, and in the batches of its loader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import launched
from dslaunch.rules.scripts.modules import Module, homes, modules_of
from dslaunch.rules.scripts.tree import LOADER, Script
from dslaunch.rules.settings import Settings

_RAN = "CPython 3.11, run"
_LOADS = (
    "yaml.safe_load", "yaml.full_load", "yaml.load", "yaml.unsafe_load", "json.load", "json.loads",
    "ruamel.yaml.safe_load",
)  # fmt: skip
_CHANGES = frozenset({"update", "setdefault", "pop", "clear", "merge"})
_ROUNDS = 3
"""Names of parts of a configuration that are followed: `model = config["model"]`."""
_THROUGH = ("enumerate", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm", "iter")


@rule("script.config-key", severity="error", raised_by="python", evidence=_RAN)
def config_key(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key that a script reads of the configuration which its command names, and that isn't in it."""
    seen = set()
    for _, command, script in launched(files):
        arguments = command.arguments
        words = [*(each.text for each in arguments.words), *(v for flag in arguments.flags for v in flag.values)]
        named = {word.rpartition("/")[2] for word in words if word.endswith((".yaml", ".yml", ".json"))}
        held = [file for file in files.files if file.name.rpartition("/")[2] in named]
        loads = script.called(*_LOADS)
        if len(named) != 1 or len(held) != 1 or len(loads) != 1 or not arguments.complete:
            continue
        name, asked = _bound_to(script, loads[0].node), _asked(script)
        for node, path in _chains(script, name) if name and isinstance(held[0].value, dict) else ():
            found = _missing(held[0], path)
            if found and found[-1] not in asked and (script.path, node.lineno, found) not in seen:
                seen.add((script.path, node.lineno, found))
                near = nearest(found[-1], list(map(str, _at(held[0].value, found[:-1]))))
                message = f"{held[0].name} has no key {'.'.join(found)}: KeyError.{near}"
                fix = f"Add it to {held[0].name}, or correct it."
                yield Hit(script.path, script.python.at(node), message, fix)


def _bound_to(script: Script, node: ast.Call) -> str:
    """The one name that a call's value is bound to, and nothing else is; empty where it isn't told."""
    for name in script.bound_at:
        if script.bound(ast.Name(name, ast.Load())) is node:
            return name
    return ""


def _chains(script: Script, root: str) -> list[tuple[ast.Subscript, tuple[str, ...]]]:
    """What is read of a name by constant keys, also by names of parts of it; nothing where it is changed."""
    prefixes: dict[str, tuple[str, ...]] = {root: ()}
    for _ in range(_ROUNDS):
        for name in script.bound_at:
            bound = script.bound(ast.Name(name, ast.Load()))
            found = _path(bound, prefixes) if isinstance(bound, ast.Subscript) else None
            if found is not None:
                prefixes[name] = found
    chains = []
    for node in script.nodes:
        owner = node.func.value if isinstance(node, ast.Call) and _changes(node.func) else None
        if _path(owner, prefixes) is not None:
            return []
        if isinstance(node, ast.Subscript) and (path := _path(node, prefixes)) is not None:
            if not isinstance(node.ctx, ast.Load):
                return []
            chains.append((node, path))
    return [] if any(isinstance(node, ast.Try) and _reads(node, prefixes) for node in script.nodes) else chains


def _changes(called: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(called, ast.Attribute) and called.attr in _CHANGES


def _reads(node: ast.Try, prefixes: dict[str, tuple[str, ...]]) -> bool:
    inner = (each for part in node.body for each in ast.walk(part))
    return any(isinstance(each, ast.Subscript) and _path(each, prefixes) is not None for each in inner)


def _path(node: ast.expr | None, prefixes: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """`("model", "dim")` of `config["model"]["dim"]`; None where it isn't one of these names by constant keys."""
    if isinstance(node, ast.Name):
        return prefixes.get(node.id)
    if not isinstance(node, ast.Subscript):
        return None
    before, key = _path(node.value, prefixes), _text(node.slice)
    return (*before, key) if before is not None and key is not None else None


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _missing(file: File, path: tuple[str, ...]) -> tuple[str, ...]:
    """The beginning of a path up to the first key that isn't there; empty where all are, or it isn't told."""
    for size, key in enumerate(path):
        held = _at(file.value, path[:size])
        if not isinstance(held, dict):
            return ()
        if key not in held:
            return path[: size + 1]
    return ()


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _asked(script: Script) -> set[str]:
    """Keys that the script asks about first: `"chunk" in config`."""
    return {
        str(node.left.value) for node in script.nodes
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)
        and isinstance(node.ops[0], ast.In | ast.NotIn)
    }  # fmt: skip


@rule("script.batch-key", severity="error", raised_by="python", evidence=f"torch 2.13 on {_RAN}")
def batch_key(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key of a batch that neither the collate function nor the data set puts there."""
    for module, folder in modules_of(files):
        script = module.script
        if "DataLoader" not in script.python.text:
            continue
        here, asked = homes(module, folder), _asked(script)
        for node in script.nodes:
            yield from _unpacked(script, node, here)
            loop = _loop(script, node)
            keys = _keys(script, loop.loader, here) if loop is not None else None
            for read in loop.reads() if loop is not None and keys else ():
                key = _text(read.slice)
                if keys is not None and key is not None and key not in {*keys, *asked}:
                    near = nearest(key, sorted(keys))
                    message = f"a batch has {listed(sorted(keys))}, and no {key}: KeyError.{near}"
                    fix = "Read what the data set gives, or add it there."
                    yield Hit(script.path, script.python.at(read), message, fix)


def _unpacked(script: Script, node: ast.AST, here: dict[str, tuple[Module, str]]) -> Iterator[Hit]:
    """A batch that the loop takes apart into another number of parts than it has."""
    loader, target = _source(script, node)
    if loader is None or not isinstance(target, ast.Tuple):
        return
    ends = _ends(_function_of(script, loader, here))
    sizes = {len(each.elts) if isinstance(each, ast.Tuple) else 0 for each in ends}
    parts = [each for end in ends if isinstance(end, ast.Tuple) for each in end.elts]
    starred = any(isinstance(each, ast.Starred) for each in (*target.elts, *parts))
    if len(sizes) == 1 and not starred and (size := sizes.pop()) and size != len(target.elts):
        message = f"a batch has {size} parts, and is taken apart into {len(target.elts)}: ValueError."
        yield Hit(script.path, script.python.at(target), message, f"Take {size} parts of it.")


@dataclass(frozen=True)
class _Loop:
    node: ast.For
    batch: str
    loader: ast.Call

    def reads(self) -> Iterator[ast.Subscript]:
        """What is read of the batch by constant texts; nothing where the name is bound anew to something else."""
        found = []
        for part in self.node.body:
            for each in ast.walk(part):
                if isinstance(each, ast.Assign) and self._binds(each) and not self._keeps(each.value):
                    return
                if not isinstance(each, ast.Subscript) or not self._is_batch(each.value):
                    continue
                if not isinstance(each.ctx, ast.Load):
                    return
                if _text(each.slice) is not None:
                    found.append(each)
        yield from found

    def _is_batch(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.batch

    def _binds(self, node: ast.Assign) -> bool:
        return any(self._is_batch(each) for each in node.targets)

    def _keeps(self, value: ast.expr) -> bool:
        """`{k: v.to(device) for k, v in batch.items()}`, with all of its keys."""
        if not isinstance(value, ast.DictComp) or len(value.generators) != 1 or value.generators[0].ifs:
            return False
        return ast.unparse(value.generators[0].iter) == f"{self.batch}.items()"


def _loop(script: Script, node: ast.AST) -> _Loop | None:
    """A loop over a loader whose batches have one name."""
    loader, target = _source(script, node)
    if loader is None or not isinstance(target, ast.Name) or not isinstance(node, ast.For):
        return None
    return _Loop(node, target.id, loader)


def _source(script: Script, node: ast.AST) -> tuple[ast.Call | None, ast.expr | None]:
    """The loader, made once, and what its batches are bound to: `for step, batch in enumerate(tqdm(loader))`."""
    if not isinstance(node, ast.For):
        return None, None
    target, source = node.target, node.iter
    while isinstance(source, ast.Call) and script.name(source.func) in _THROUGH and source.args:
        if script.name(source.func) == "enumerate":
            pair = isinstance(target, ast.Tuple) and len(target.elts) == 2
            target = target.elts[1] if isinstance(target, ast.Tuple) and pair else ast.Constant(None)
        source = source.args[0]
    made = script.bound(source) if isinstance(source, ast.Name) else None
    if not isinstance(made, ast.Call) or script.name(made.func) != LOADER or not all(k.arg for k in made.keywords):
        return None, None
    return made, target


def _function_of(
    script: Script, loader: ast.Call, here: dict[str, tuple[Module, str]]
) -> ast.FunctionDef | None:
    """What makes the batches of a loader: its collate function, or its data set's __getitem__."""
    given = {each.arg: each.value for each in loader.keywords}
    collate = given.get("collate_fn")
    if collate is not None:
        made = _defined(collate, here)
        return made if isinstance(made, ast.FunctionDef) else None
    data = script.bound(given.get("dataset", loader.args[0] if loader.args else None))
    made = _defined(data.func, here) if isinstance(data, ast.Call) else None
    body = made.body if isinstance(made, ast.ClassDef) else []
    items = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "__getitem__"]
    return items[0] if len(items) == 1 else None


def _ends(function: ast.FunctionDef | None) -> list[ast.expr | None]:
    """What a function returns."""
    nodes = ast.walk(function) if function is not None else ()
    return [node.value for node in nodes if isinstance(node, ast.Return)]


def _defined(node: ast.expr, here: dict[str, tuple[Module, str]]) -> ast.FunctionDef | ast.ClassDef | None:
    home = here.get(node.id) if isinstance(node, ast.Name) else None
    made = home[0].definitions.get(home[1]) if home is not None else None
    return made if made is not None and not made.decorator_list else None


def _keys(script: Script, loader: ast.Call, here: dict[str, tuple[Module, str]]) -> set[str] | None:
    """The keys of a loader's batches, as they are written out and returned; None where they aren't told."""
    found: set[str] = set()
    for end in _ends(_function_of(script, loader, here)):
        for key in end.keys if isinstance(end, ast.Dict) else [None]:
            text = _text(key) if key is not None else None
            if text is None:
                return None
            found.add(text)
    return found or None
