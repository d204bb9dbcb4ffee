"""What SLURM sets in the environment of a batch script, where its `#SBATCH` lines tell."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GPUS = re.compile(r"(?:gres[:/])?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d{1,6})(?:\(.*\))?")
"""`8`, `a100:8` of --gpus-per-node; `gpu:a100:8` of --gres."""
_NUMBER = re.compile(r"0*[1-9]\d{0,6}")


def gpus(value: str) -> int | None:
    """The number in a value of --gpus-per-node or --gres; None where it holds none."""
    match = _GPUS.fullmatch(value)
    return int(match[1]) or None if match else None


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Variables of the batch script by name; one that the options don't tell isn't there.

    As SLURM 22.05 sets them, run: SLURM_NTASKS is there where --ntasks or --ntasks-per-node is given, and what an
    option gives where it is.

    Args:
        given: values of options by name, as typed: `--nodes`, `-N`.
    """

    def typed(*names: str) -> str:
        return next((given[name] for name in names if name in given), "")

    nodes, per_node = typed("--nodes", "-N"), typed("--ntasks-per-node", "--tasks-per-node")
    found = {
        "SLURM_NNODES": _number(nodes),
        "SLURM_NTASKS": _number(typed("--ntasks", "-n")) or _product(nodes, per_node),
        "SLURM_NTASKS_PER_NODE": _number(per_node),
        "SLURM_TASKS_PER_NODE": _repeated(per_node, nodes),
        "SLURM_GPUS_ON_NODE": str(gpus(typed("--gpus-per-node", "--gres")) or ""),
        "SLURM_GPUS_PER_NODE": typed("--gpus-per-node"),
        "SLURM_GPUS": typed("--gpus", "-G"),
        "SLURM_CPUS_PER_TASK": _number(typed("--cpus-per-task", "-c")),
    }
    found |= {"SLURM_JOB_NUM_NODES": found["SLURM_NNODES"], "SLURM_NPROCS": found["SLURM_NTASKS"]}
    return {name: value for name, value in found.items() if value}


def _number(text: str) -> str:
    return str(int(text)) if _NUMBER.fullmatch(text) else ""


def _product(one: str, other: str) -> str:
    return str(int(one) * int(other)) if _number(one) and _number(other) else ""


def _repeated(tasks: str, nodes: str) -> str:
    """`8(x4)`: 8 tasks on each of 4 nodes; `8` on one."""
    if not _number(tasks) or not _number(nodes):
        return ""
    return _number(tasks) if int(nodes) == 1 else f"{_number(tasks)}(x{_number(nodes)})"
