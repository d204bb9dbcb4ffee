"""Keep a rank to cores of its own: cores.py STARTER LOCAL_RANK LOCAL_SIZE COMMAND..., put before a rank's program.

A host's cores, or those of them that this process may use, are shared out among its ranks: whole ones, with all
their threads. A rank gets cores of the NUMA node that its GPU hangs on, where nvidia-smi and the kernel tell for
every rank of the host; else the cores are cut in the order of their NUMA nodes. STARTER `slurm` is a task of srun:
where SLURM keeps it to some of the host's CPUs already, that stays.

This file is written into the run folder. It needs Python 3.9 alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_LIMIT_S = 20.0
_SMI = ("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader")
Core = tuple[int, ...]
"""CPUs that are the threads of one core."""


def cpus_in(text: str) -> list[int]:
    """`0-3,8` of the kernel's lists."""
    ends = (part.partition("-") for part in text.strip().split(",") if part.strip())
    return [cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)]


def ranges(cpus: Collection[int]) -> str:
    """The opposite: 0-3,8."""
    found: list[list[int]] = []
    for cpu in sorted(cpus):
        if found and cpu == found[-1][1] + 1:
            found[-1][1] = cpu
        else:
            found.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def cores_by_node(allowed: Collection[int], root: Path) -> dict[int, list[Core]]:
    """The cores that may be used, by NUMA node; node 0 where the kernel names none."""
    nodes = {
        cpu: int(path.parent.name[len("node") :])
        for path in root.glob("sys/devices/system/node/node[0-9]*/cpulist")
        for cpu in cpus_in(path.read_text())
    }
    threads: dict[tuple[int, str, str], list[int]] = {}
    for cpu in sorted(allowed):
        place = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = (_text(place / name) or f"cpu{cpu}" for name in ("physical_package_id", "core_id"))
        threads.setdefault((nodes.get(cpu, 0), package, core), []).append(cpu)
    found: dict[int, list[Core]] = {}
    for (node, _, _), cpus in threads.items():
        found.setdefault(node, []).append(tuple(cpus))
    return {node: sorted(found[node]) for node in sorted(found)}


def nodes_of_gpus(listed: str, visible: str, size: int, root: Path) -> list[int]:
    """The NUMA node of each local rank's GPU; empty where it is not known of every one.

    Args:
        listed: what nvidia-smi prints of index and pci.bus_id.
        visible: CUDA_VISIBLE_DEVICES; numbers choose among the GPUs, empty is all.
    """
    rows = [line.split(",") for line in listed.splitlines() if line.count(",") == 1]
    buses = {index.strip(): bus.strip()[-12:].lower() for index, bus in rows}
    chosen = [name.strip() for name in visible.split(",")] if visible else list(buses)
    texts = [_text(root / f"sys/bus/pci/devices/{buses.get(name, '-')}/numa_node") for name in chosen[:size]]
    known = [int(text) for text in texts if text.isdecimal()]  # -1: the kernel does not know
    return known if len(known) == size else []


def chosen(rank: int, size: int, cores: Mapping[int, Sequence[Core]], nodes: Sequence[int]) -> set[int]:
    """CPUs of a local rank: single threads where there are fewer cores than ranks, none where those are too few.

    Args:
        nodes: the NUMA node of each rank's GPU; empty: not known.
    """
    if nodes and all(nodes.count(node) <= len(cores.get(node, ())) for node in nodes):
        own = cores[nodes[rank]]
        return _part(own, nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]))
    every = [core for own in cores.values() for core in own]
    if len(every) < size:
        every = [(cpu,) for core in every for cpu in core]
    return _part(every, rank, size) if len(every) >= size else set()


def _part(cores: Sequence[Core], at: int, parts: int) -> set[int]:
    first, last = len(cores) * at // parts, len(cores) * (at + 1) // parts
    return {cpu for core in cores[first:last] for cpu in core}


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _gpus() -> str:
    try:
        return subprocess.run(_SMI, capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def bind(starter: str, rank: int, size: int) -> str:
    """Keep this process, and what it becomes, to its cores; returns what was done, in words."""
    allowed, root = os.sched_getaffinity(0), Path("/")
    if starter == "slurm" and len(allowed) < (os.cpu_count() or 0):
        return f"SLURM keeps local rank {rank} to CPUs {ranges(allowed)}"
    nodes = nodes_of_gpus(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), size, root)
    cores = cores_by_node(allowed, root)
    cpus = chosen(rank, size, cores, nodes)
    if not cpus:
        return f"{size} ranks, and fewer CPUs ({ranges(allowed)}): local rank {rank} is kept to none"
    os.sched_setaffinity(0, cpus)
    why = f"NUMA node {nodes[rank]}, its GPU's" if nodes else "its share of the host's cores"
    return f"local rank {rank} is kept to CPUs {ranges(cpus)}: {why}"


def main(argv: Sequence[str]) -> None:
    starter, rank, size, *command = argv
    print(f"cores.py: {bind(starter, int(rank), int(size))}", file=sys.stderr, flush=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
