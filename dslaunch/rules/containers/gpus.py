"""GPUs of a pod, beside the processes that are started in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import Container, Workload, as_dict, workloads
from dslaunch.planfile import Plan
from dslaunch.rules.containers.manifests import containers_of, of_containers
from dslaunch.rules.launchers.torchrun import option
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.heredocs import Inner

_DOCUMENTATION = "the documentation of Kubernetes 1.33"
_GPU = "nvidia.com/gpu"


@rule(
    "kubernetes.gpus", severity="error", raised_by="torch",
    evidence=f"{_DOCUMENTATION}: Schedule GPUs; kubernetes/kubernetes:pkg/apis/core/validation/validation.go 1.33",
)  # fmt: skip
def gpus(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More processes than a pod has GPUs, or GPUs that are asked for in requests alone."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            for container in containers_of(workload):
                yield from _asked_for(file, container)
            yield from _of_operators_number(file, workload) if workload.kind == "PyTorchJob" else ()
    for workload, container, inner in of_containers(files):
        limit = str(container.resource("limits", _GPU))
        yield from _elsewhere(workload, container, inner)
        yield from _of_accelerate(container, inner) if workload.kind != "MPIJob" else ()
        for launch in inner.file.value.launches:
            launcher = launch.launcher("torchrun")
            number = option(launcher, "nproc-per-node") if launcher else None
            if launcher is None or number is None or not number.isdecimal() or workload.kind == "MPIJob":
                continue
            at = launcher.options.position("--nproc-per-node", "--nproc_per_node")
            if limit.isdecimal() and int(number) > int(limit):
                has = f"{limit} GPU{'s' if limit != '1' else ''}"
                message = f"{number} processes, and the pod has {has}: invalid device ordinal."
                fix = f"Ask for {_GPU}: {number}, or start {limit}."
                yield from inner.at_home(Hit(inner.file.name, at, message, fix))
            elif limit.isdecimal() and int(number) < int(limit):
                idle = int(limit) - int(number)
                message = f"{number} of the pod's {limit} GPUs are used, and {idle} not."
                fix = f"Write --nproc-per-node={limit}."
                found = Hit(inner.file.name, at, message, fix, "slow", "nobody")
                yield from inner.at_home(found)


def _asked_for(file: File, container: Container) -> Iterator[Hit]:
    """GPUs in requests alone, or another number of them."""
    wanted, limit = container.resource("requests", _GPU), container.resource("limits", _GPU)
    if wanted is not None and str(wanted) != str(limit):
        what = "and no limit" if limit is None else f"and a limit of {limit}"
        message = f"{wanted} of {_GPU} in requests {what}: the API refuses the pod."
        path = (*container.path, "resources", "requests", _GPU)
        fix = f"Write the same number under limits: {_GPU}: {wanted}."
        yield hit(file, path, message, fix, raised_by="nobody")


def _of_operators_number(file: File, workload: Workload) -> Iterator[Hit]:
    """nprocPerNode, which torchrun takes where it has no number of its own."""
    spec = as_dict(workload.value.get("spec"))
    number = str(spec.get("nprocPerNode", ""))
    for container in containers_of(workload):
        limit, words = str(container.resource("limits", _GPU)), " ".join(word for _, word in container.words)
        own = re.search(r"--nproc[_-]per[_-]node", words)
        if own or "torchrun" not in words or not number.isdecimal() or not limit.isdecimal() or number == limit:
            continue
        path = (*workload.path, "spec", "nprocPerNode")
        if int(number) > int(limit):
            message = f"{number} processes, and a pod has {limit} GPUs: invalid device ordinal."
            yield hit(file, path, message, f'Write "{limit}".')
        else:
            message = f"{number} of a pod's {limit} GPUs are used, and {int(limit) - int(number)} not."
            yield hit(file, path, message, f'Write "{limit}".', severity="slow", raised_by="nobody")
        break


def _of_accelerate(container: Container, inner: Inner) -> Iterator[Hit]:
    """accelerate's processes of all machines, beside one pod's GPUs."""
    limit = str(container.resource("limits", _GPU))
    for launch in inner.file.value.launches:
        accelerate = launch.launcher("accelerate")
        total = accelerate.options.value("--num_processes") if accelerate else None
        machines = (accelerate.options.value("--num_machines") if accelerate else None) or "1"
        if accelerate is None or total is None or not all(each.isdecimal() for each in (total, machines, limit)):
            continue
        each, rest = divmod(int(total), max(int(machines), 1))
        at = accelerate.options.position("--num_processes")
        wanted = int(limit) * int(machines)
        if not rest and each > int(limit) > 0:
            message = f"{each} processes on each machine, and the pod has {limit} GPUs: invalid device ordinal."
            yield from inner.at_home(Hit(inner.file.name, at, message, f"Write --num_processes {wanted}."))
        elif not rest and each < int(limit):
            idle = int(limit) - each
            message = f"{total} processes on {machines} machines: {idle} of each pod's GPUs are not used."
            fix = f"Write --num_processes {wanted}, which counts those of all machines."
            yield from inner.at_home(Hit(inner.file.name, at, message, fix, "slow", "nobody"))


def _elsewhere(workload: Workload, container: Container, inner: Inner) -> Iterator[Hit]:
    """GPUs that another container of the pod asks for, and not the one that trains."""
    pods = next(each for each in workload.kinds if container in each.containers)
    besides = (each for each in pods.all_containers if each.path != container.path)
    others = [each for each in besides if each.resource("limits", _GPU)]
    resources = as_dict(container.value.get("resources"))
    own = [str(name) for part in ("limits", "requests", "claims") for name in as_dict(resources.get(part))]
    if not others or resources.get("claims") or any("gpu" in name for name in own):
        return
    for launch in inner.file.value.launches:
        torchrun = launch.launcher("torchrun")
        count = option(torchrun, "nproc-per-node") if torchrun else None
        if torchrun and count and (count.isdecimal() or count in ("gpu", "auto")):
            message = (
                f"the GPUs are given to the container {others[0].value.get('name')}, and to this one none: each "
                "container has its own."
            )
            at = torchrun.options.position("--nproc-per-node", "--nproc_per_node")
            fix = f"Write {_GPU} under this container's limits."
            yield from inner.at_home(Hit(inner.file.name, at, message, fix))
