"""DeepSpeed configurations that a script holds or writes, checked as a DeepSpeed JSON in its place would be."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, cast

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.position import Position, dotted
from dslaunch.planfile import Plan
from dslaunch.rules.containers.compose import in_services
from dslaunch.rules.containers.config_maps import in_manifests
from dslaunch.rules.registry import Hit, Rule, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.literals import Written, fillings, is_read, written
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.heredocs import in_heredocs
from dslaunch.rules.shell.wraps import in_wraps

_LONGEST_LIST = 6
_MOST = 20
"""Configurations of one script that are read; DeepSpeed's own tests have up to eight in a file."""
_MOST_CALLS = 20_000
"""Calls that are gone through for all of them together: each configuration asks every rule anew."""
_MOST_HITS = 200
"""Of one rule on one configuration."""


@dataclass(frozen=True)
class Held:
    """One configuration of a script."""

    script: Script
    at: Position
    """Where the dictionary begins."""
    found: Written
    huggingface: bool
    """Hugging Face reads it, and fills in `auto`."""

    def file(self, value: dict[str, Any]) -> File:
        """The configuration with `value` in it, as a DeepSpeed JSON whose keys stand in the script."""
        positions = MappingProxyType({**self.found.positions, (): self.at})
        text = self.script.python.text
        return File(self.script.path, "deepspeed_json", text, value, positions, inside=True)


def held(files: FileSet) -> Iterator[Held]:
    """The configurations that scripts hand to DeepSpeed, the Trainer or accelerate."""
    for script in scripts(files):
        yield from _held(script)


def _held(script: Script) -> tuple[Held, ...]:
    """Found once for all rules, and kept with the script."""
    kept = vars(script)
    if _KEPT not in kept:
        found = (one for call in script.calls for one in _of_call(script, call))
        most = min(_MOST, max(1, _MOST_CALLS // max(1, len(script.calls))))
        kept[_KEPT] = tuple(islice({(one.at, one.huggingface): one for one in found}.values(), most))
    return cast(tuple[Held, ...], kept[_KEPT])


_KEPT = "configurations held"


def _of_call(script: Script, call: Call) -> Iterator[Held]:
    if (reader := _read_by(call)) is not None:
        argument, huggingface = reader
        for node, name in _dictionaries(script, argument, call.around):
            yield Held(script, script.python.at(node), written(script, node, name), huggingface)


def _read_by(call: Call) -> tuple[ast.expr, bool] | None:
    """What a call hands over as a DeepSpeed configuration, and whether Hugging Face reads it."""
    if call.name == "deepspeed.initialize":
        config = call.argument("config", 10) or call.argument("config_params", 12)
        return (config, False) if config is not None else None
    if call.method == "DeepSpeedPlugin":
        config = call.argument("hf_ds_config", 0)
    else:
        config = call.keyword("deepspeed") if call.method.endswith(("Arguments", "Config")) else None
    return (config, True) if config is not None else None


def _dictionaries(
    script: Script, argument: ast.expr, around: Sequence[ast.AST]
) -> Iterator[tuple[ast.Dict, str]]:
    """Each dictionary that an argument may be, of each branch and each return, and the variable it is in."""
    name = argument.id if isinstance(argument, ast.Name) else ""
    for node in possible(script, argument, around):
        if isinstance(node, ast.Dict):
            yield node, name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in script.functions:
            yield from _returned(script, script.functions[node.func.id])


def _returned(script: Script, function: ast.FunctionDef) -> Iterator[tuple[ast.Dict, str]]:
    for each in ast.walk(function):
        if isinstance(each, ast.Return) and each.value is not None:
            name = each.value.id if isinstance(each.value, ast.Name) else ""
            for node in possible(script, each.value, (function,)):
                if isinstance(node, ast.Dict):
                    yield node, name


def hits_in_scripts(
    files: FileSet, settings: Settings, asked: Sequence[Rule], before: set[tuple[str, Hit]]
) -> Iterator[tuple[Rule, Hit]]:
    """What the rules say of each configuration in a script that they don't say without it (`before`).

    Of what isn't written out several fillings are tried, and what isn't said of each of them isn't said at all.
    """
    others = tuple(file for file in files.files if file.kind != "deepspeed_json")
    written = [inner.file for inner in in_heredocs(files) if inner.file.kind == "kubernetes"]
    of_heredocs = in_manifests(FileSet(tuple(written)))
    for inner in chain(in_heredocs(files), in_manifests(files), of_heredocs, in_services(files), in_wraps(files)):
        found = _hits(asked, inner.beside(files), inner.known(settings))
        found = ((by, moved) for by, hit in found if (moved := inner.moved(hit)))
        said_here = {(by.id, hit): (by, hit) for by, hit in found if (by.id, hit) not in before}
        before.update(said_here)
        yield from said_here.values()
    for one in held(files):
        if one.found.extended:
            continue
        known = replace(settings, huggingface=one.huggingface)
        filled = (FileSet((one.file(value), *others)) for value in fillings(one.found))
        left_open = {(one.script.path, one.found.positions[path]) for path in one.found.open if is_read(path)}
        said = {
            (by.id, hit): (by, hit)
            for by, hit in _hits(asked, next(filled), known)
            if (by.id, hit) not in before and (hit.name, hit.at) not in left_open
        }
        while said and (other := next(filled, None)):
            speak = {by.id: by for by, _ in said.values()}
            again = {(by.id, hit) for by, hit in _hits(speak.values(), other, known)}
            said = {found: each for found, each in said.items() if found in again}
        before.update(said)
        yield from said.values()


def _hits(asked: Iterable[Rule], files: FileSet, settings: Settings) -> Iterator[tuple[Rule, Hit]]:
    for each in asked:
        yield from ((each, hit) for hit in islice(each.check(None, files, settings), _MOST_HITS))


@rule("check.computed", severity="info", raised_by="nobody", evidence="dslaunch's own")
def computed(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DeepSpeed configuration in a script that isn't written out: what is computed wasn't checked."""
    for one in held(files):
        if one.found.extended:
            message = "keys are added to this configuration that aren't written out: it wasn't checked."
        elif one.found.open:
            names = listed(sorted(dotted(path) for path in one.found.open), limit=_LONGEST_LIST)
            message = f"not written out, so not checked: {names}."
        else:
            continue
        fix = "Write the values out, or check the JSON that the script makes of them."
        yield Hit(one.script.path, one.at, message, fix)
