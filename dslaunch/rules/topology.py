"""What is known of ranks: from the plan, from options, or from the file itself."""

from __future__ import annotations

import re

from dslaunch.files.fileset import File
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.rules.settings import Settings

_OWN_NAME = re.compile(r"(?:.*/)?ds_config(?:\.(?P<component>.+))?\.json")


def component(plan: Plan, file: File) -> tuple[str, ComponentPlan] | None:
    """The component whose DeepSpeed JSON this is (`ds_config.NAME.json`; `ds_config.json` of the only one)."""
    match = _OWN_NAME.fullmatch(file.name)
    name = match["component"] if match else None
    if name is None and len(plan.components) == 1:
        name = next(iter(plan.components))
    return (name, plan.components[name]) if name in plan.components else None


def replicas(plan: Plan | None, file: File, settings: Settings) -> list[int]:
    """The data-parallel sizes that DeepSpeed may divide the batch by; empty where that isn't known.

    DeepSpeedConfig takes the whole world where tensor_parallel.autotp_size cuts the model (0.19.8), the mesh's
    data-parallel size where the program passes one, and world / sequence_parallel_size where the configuration
    is a dict; from a file it doesn't see that key. So there may be two.
    """
    world = plan.world_size if plan else settings.world_size
    if world is None or (plan is None and _of_component(file)):
        return []
    tensor = file.get("tensor_parallel", "autotp_size")
    if isinstance(tensor, int) and tensor > 1:
        return [world]
    mesh = _mesh(plan, file) if plan else settings.data_parallel
    if mesh is None:
        return []
    sequence = file.get("sequence_parallel_size")
    if isinstance(sequence, int) and sequence > 1 and mesh % sequence == 0:
        return [mesh, mesh // sequence]
    return [mesh]


def _of_component(file: File) -> bool:
    """One component's file of several: only their plan tells its mesh."""
    match = _OWN_NAME.fullmatch(file.name)
    return match is not None and match["component"] is not None


def _mesh(plan: Plan, file: File) -> int | None:
    found = component(plan, file)
    sizes = {part.dp for part in plan.components.values()}
    if found is not None:
        return found[1].dp
    return sizes.pop() if len(sizes) == 1 else None
