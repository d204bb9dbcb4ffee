"""Meshes of ranks that a training script makes, against the ranks that are started."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_MESH = ("torch.distributed.device_mesh.init_device_mesh", "torch.distributed.init_device_mesh")


@rule(
    "script.mesh-size", severity="error", raised_by="torch",
    evidence="pytorch/pytorch:torch/distributed/device_mesh.py 2.13, run on eight ranks",
)  # fmt: skip
def mesh_size(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A mesh of more ranks, or of fewer, than are started."""
    count = settings.world_size
    for script in scripts(files) if count is not None else ():
        for call in script.called(*_MESH):
            sizes = _sizes(files, script, call, count)
            if count is None or sizes is None or list(guards(call)) or prod(sizes) == count:
                continue
            shape, ranks = " x ".join(map(str, sizes)), prod(sizes)
            if ranks > count:
                message = (
                    f"a mesh of {shape} = {ranks} ranks, and {count} are started: RuntimeError, Mesh should not "
                    "be bigger than default world size."
                )
                yield script.hit(call, message, f"Choose sizes that make {count}: {_fitting(sizes, count)}.")
            else:
                message = f"a mesh of {shape} = {ranks} ranks, and {count} are started: the others have no place."
                found = script.hit(call, message, f"Choose sizes that make {count}, or start {ranks}.")
                yield replace(found, severity="wrong", raised_by="nobody")


def _sizes(files: FileSet, script: Script, call: Call, world: int | None) -> list[int] | None:
    """The sizes of a mesh, where each is told by a number, an argument, or the ranks divided by one."""
    shape = script.bound(call.argument("mesh_shape", 1))
    if not isinstance(shape, ast.Tuple | ast.List):
        return None
    sizes = [value_of(files, script, each, call.around, world) for each in shape.elts]
    return sizes if sizes and all(type(size) is int and size > 0 for size in sizes) else None


def _fitting(sizes: list[int], count: int) -> str:
    """The shapes that one other size would make fit."""
    found = []
    for place, size in enumerate(sizes):
        rest = prod(sizes) // size
        if count % rest == 0:
            found.append(" x ".join(str(count // rest if at == place else each) for at, each in enumerate(sizes)))
    return listed(found) if found else "none of these sizes can stay as it is"
