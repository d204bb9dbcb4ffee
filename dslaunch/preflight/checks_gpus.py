"""What the GPUs of a host must be: all there, of the planned type, in order, and free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslaunch.preflight.facts import Host
from dslaunch.preflight.reading.nvidia_smi import Gpu
from dslaunch.preflight.target import Hit, Target

_MEMORY_TOLERANCE = 0.08
"""What nvidia-smi shows is up to that much less than the name says (ECC, reserved)."""


def gpus(host: Host, target: Target) -> Iterator[Hit]:
    if not target.gpus or not host.answered:
        return
    seen, wanted = host.gpus, target.gpus_on(host.name)
    if seen.fault:
        yield Hit("gpu.lost", host.name, seen.fault.splitlines()[0])
        return
    if seen.found is None:
        if target.plan.cluster.accelerator == "cuda" and seen.devices < wanted:
            yield Hit("gpu.missing", host.name, f"{seen.devices} of {wanted}, counted in /dev")
        return
    used = seen.usable[:wanted]
    if len(used) < wanted:
        among = f" among those of CUDA_VISIBLE_DEVICES={','.join(seen.visible)}" if seen.visible else ""
        yield Hit("gpu.missing", host.name, f"{len(used)} of {wanted}{among}")
    for gpu in used:
        yield from _one(host, gpu, target)
    busy = {app.gpu for app in seen.apps}
    for gpu in used:
        if gpu.uuid in busy:
            yield Hit("gpu.busy", host.name, f"GPU {gpu.index}: {_holders(host, gpu.uuid)}")
    if seen.diagnosis:
        yield Hit("gpu.diagnosis", host.name, "; ".join(seen.diagnosis))


def _one(host: Host, gpu: Gpu, target: Target) -> Iterator[Hit]:
    planned, memory = target.plan.cluster.gpu, target.preflight.gpu_memory_gib
    if not _same_type(gpu, planned, memory):
        shown = f"{gpu.name}, {gpu.memory_mib} MiB"
        yield Hit("gpu.type", host.name, f"GPU {gpu.index} is {shown}; planned is {planned}, {memory:g} GiB")
    if gpu.ecc_errors:
        yield Hit("gpu.ecc", host.name, f"GPU {gpu.index}: {gpu.ecc_errors} since the driver was loaded")
    if reasons := host.gpus.throttled.get(gpu.index):
        yield Hit("gpu.throttled", host.name, f"GPU {gpu.index}: {', '.join(reasons)}")


def _same_type(gpu: Gpu, planned: str, memory_gib: float) -> bool:
    """By the model's word (H100 of H100-SXM5-80GB and of NVIDIA H100 80GB HBM3) and its memory."""
    model = re.split(r"[-\s]", planned)[0].removeprefix("RTX")
    named = model.lower() in gpu.name.lower().replace("rtx", "")
    if gpu.memory_mib is None:
        return named
    return named and abs(gpu.memory_mib / 1024 / memory_gib - 1) <= _MEMORY_TOLERANCE


def _holders(host: Host, uuid: str) -> str:
    apps = [app for app in host.gpus.apps if app.gpu == uuid]
    return ", ".join(f"{app.name} (process {app.pid}, {app.memory_mib or '?'} MiB)" for app in apps)


def nvlinks(hosts: Sequence[Host], target: Target) -> Iterator[Hit]:
    """GPUs with fewer links up than the best one has: cards on bridges leave some unused on every GPU."""
    if not target.preflight.nvlink:
        return
    up = {
        (host.name, gpu): sum(bool(speed) for speed in links)
        for host in hosts
        for gpu, links in host.gpus.links.items()
    }
    most = max(up.values(), default=0)
    for (host, gpu), count in up.items():
        if count < most or not most:
            yield Hit("gpu.nvlink", host, f"GPU {gpu}: {count} links up, {most} on others")


PER_HOST = (gpus,)
ACROSS = (nvlinks,)
