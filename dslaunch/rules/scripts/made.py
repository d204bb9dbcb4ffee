"""Of which class a model is that a script calls, through what wraps it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dslaunch.rules.scripts.modules import Module
from dslaunch.rules.scripts.objects import moved
from dslaunch.rules.scripts.tree import DDP, Script

_WRAPS = (DDP, "torch.compile")


@dataclass(frozen=True)
class Models:
    """What a script binds its names to, as far as models go."""

    script: Script

    def made(self, called: ast.expr) -> ast.expr | None:
        """What was called to make the object that is called; None where several or others may be meant."""
        waiting, seen, found = [called.id] if isinstance(called, ast.Name) else [], set[str](), set[str]()
        classes: list[ast.expr] = []
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for source in self._sources.get(name, [None]):
                if source is None:
                    return None
                if isinstance(source, ast.Name):
                    waiting.append(source.id)
                elif isinstance(source, ast.Call) and (text := ast.unparse(source.func)) not in found:
                    found.add(text)
                    classes.append(source.func)
        return classes[0] if len(classes) == 1 else None

    @cached_property
    def _sources(self) -> dict[str, list[ast.expr | None]]:
        """Of each name the calls or names that it is bound to; None for anything else."""
        found: dict[str, list[ast.expr | None]] = {}
        counted: dict[str, int] = {}
        for node in self.script.nodes:
            for name, source in self._pairs(node) if isinstance(node, ast.Assign) else ():
                found.setdefault(name, []).append(source)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                counted[node.id] = counted.get(node.id, 0) + 1
            elif isinstance(node, ast.arg):
                found.setdefault(node.arg, []).append(None)
        for name, times in counted.items():  # a loop, a with, a walrus
            if times > len(found.get(name, [])):
                found.setdefault(name, []).append(None)
        return found

    def _pairs(self, node: ast.Assign) -> Iterator[tuple[str, ast.expr | None]]:
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(names) == len(value.elts):
            for each, one in zip(names, value.elts, strict=True):
                if isinstance(each, ast.Name):
                    yield each.id, self._source(one, None)
            return
        for at, each in enumerate(names):
            if isinstance(each, ast.Name):
                yield each.id, self._source(value, at if isinstance(target, ast.Tuple) else None)

    def _source(self, value: ast.expr, at: int | None) -> ast.expr | None:
        """The name or call behind a value, or behind one of several that a call returns."""
        inner = moved(value)
        if not isinstance(inner, ast.Call):
            return inner if isinstance(inner, ast.Name) and at is None else None
        name = self.script.name(inner.func)
        if name == "deepspeed.initialize" and at == 0:
            given = {each.arg: each.value for each in inner.keywords}
            return given.get("model") if isinstance(given.get("model"), ast.Name) else None
        if isinstance(inner.func, ast.Attribute) and inner.func.attr == "prepare":
            return inner.args[at or 0] if len(inner.args) > (at or 0) else None
        if at is not None:
            return None
        if name in _WRAPS and inner.args:
            return moved(inner.args[0])
        return inner


def forward_of(home: tuple[Module, str] | None) -> tuple[ast.ClassDef, ast.FunctionDef] | None:
    """A model's class and its own forward; None where another one may be called."""
    made = home[0].definitions.get(home[1]) if home is not None else None
    if not isinstance(made, ast.ClassDef) or not any("Module" in ast.unparse(base) for base in made.bases):
        return None
    functions = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
    forward = functions.get("forward")
    return (made, forward) if forward is not None and "__call__" not in functions else None
