"""Kubernetes manifests that start a training: what the API refuses, pods that don't meet, GPUs, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.manifest import Container, Pods, Workload, workloads
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.manifests import of_containers, shell_text
from dslaunch.rules.launchers.torchrun import most_nodes, option
from dslaunch.rules.registry import Hit, Severity, hit, rule
from dslaunch.rules.settings import Settings

_API = "kubernetes/kubernetes:pkg/apis/core/validation/validation.go, pkg/apis/batch/validation/validation.go 1.33"
_OPERATOR = "kubeflow/training-operator:pkg/controller.v1/pytorch/envvar.go 1.8"
_DOCUMENTATION = "the documentation of Kubernetes 1.33"
_GPU = "nvidia.com/gpu"
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|\{[A-Z_][A-Z0-9_]*\})")
_LAUNCHER = re.compile(r"\b(?:torchrun|deepspeed|accelerate launch|torch\.distributed)\b")
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0")
_INDEX = "JOB_COMPLETION_INDEX"


def _of(files: FileSet) -> Iterator[tuple[File, Workload]]:
    """The objects that start pods."""
    return ((file, each) for file in files.of("kubernetes") for each in workloads(file.value))


def _trains(workload: Workload, container: Container) -> bool:
    """Whether a container is one rank, or starts ranks."""
    words = " ".join(word for _, word in container.words)
    return workload.kind == "PyTorchJob" or _LAUNCHER.search(words) is not None


def _is_template(workload: Workload) -> bool:
    """Whether envsubst or the like fills it in: there are variables where Kubernetes reads none."""
    values = [container.value for container in _containers(workload)]
    return any("$" in str(value.get(key)) for value in values for key in ("image", "resources"))


@rule(
    "kubernetes.exec-variable", severity="error", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: command and args; torchrun 2.13, run",
)  # fmt: skip
def exec_variable(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """$NAME in a container's command that no shell reads: the program gets these letters."""
    for file, workload in _of(files) if plan is None else ():
        for container in _containers(workload):
            direct = shell_text(container) is None and not _is_template(workload)
            for path, word in container.words if direct else ():
                if found := _VARIABLE.search(word):
                    name = found[0].strip("${}")
                    message = f"no shell reads this command: {found[0]} reaches the program as it stands."
                    fix = f"Write $({name}), which Kubernetes fills in, or run it by sh -c."
                    yield hit(file, path, message, fix)


def _containers(workload: Workload) -> Iterator[Container]:
    return (container for pods in workload.kinds for container in pods.containers)


@rule(
    "kubernetes.pods", severity="hang", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: Jobs, Indexed completion mode; torchrun 2.13, run",
)  # fmt: skip
def pods(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Not as many pods as the launcher has nodes, pods that don't run at a time, or without a number."""
    if plan is not None:
        return
    said: set[tuple[str, Path]] = set()
    for file, workload in _of(files):
        found = [fault for each in workload.pods for fault in _of_job(file, workload, each)]
        said |= {(file.name, workload.path) for _ in found}
        yield from found
    for workload, _, inner in of_containers(files):
        if (inner.file.name, workload.path) in said:
            continue
        for launch in inner.file.value.launches if workload.kind not in ("Deployment", "MPIJob") else ():
            launcher = launch.launcher("torchrun")
            nodes, count = most_nodes(launcher) if launcher else None, workload.count
            if launcher is None or nodes is None or not count or nodes == count:
                continue
            elastic = "elasticPolicy" in (workload.value.get("spec") or {})
            if workload.kind == "PyTorchJob" and (elastic or not launcher.options.has("--nnodes")):
                continue  # PET_NNODES
            message = f"torchrun is for {nodes} node{'s' if nodes > 1 else ''}, and {_pods(count)}"
            message += ": it waits for more." if nodes > count else ": they don't train together."
            at = launcher.options.position("--nnodes") if launcher.options.has("--nnodes") else launcher.at
            fix = f"Write --nnodes={count}, or start {nodes}."
            severity: Severity | None = None if nodes > count else "wrong"
            yield from inner.at_home(Hit(inner.file.name, at, message, fix, severity))


def _pods(count: int) -> str:
    return "there is one pod" if count == 1 else f"there are {count} pods"


def _of_job(file: File, workload: Workload, each: Pods) -> Iterator[Hit]:
    """What a Job says of its pods."""
    if workload.kind not in ("Job", "JobSet"):
        return
    completions, parallelism = each.maker.get("completions"), each.maker.get("parallelism", 1)
    indexed = each.maker.get("completionMode") == "Indexed"
    whole = isinstance(completions, int) and isinstance(parallelism, int)
    if whole and parallelism < completions and _launches(each):
        message = f"{completions} pods are wanted and {parallelism} run at a time: those wait for the others."
        path = (*each.above, "parallelism" if "parallelism" in each.maker else "completions")
        yield hit(file, path, message, f"Write parallelism: {completions}.")
    reads = [path for container in each.containers for path, word in container.words if _INDEX in word]
    if reads and not indexed:
        message = f"{_INDEX} is set in an Indexed Job alone: here it is empty."
        yield hit(file, reads[0], message, "Add completionMode: Indexed.", severity="error")


def _launches(each: Pods) -> bool:
    """Whether the pods are the nodes of one training: they run a launcher, or name a meeting point."""
    words = " ".join(word for container in each.containers for _, word in container.words)
    names = {str(entry.get("name")) for container in each.containers for _, entry in container.environment}
    return "MASTER_ADDR" in names or re.search(r"\btorchrun\b|torch\.distributed|--nnodes|rdzv", words) is not None


@rule(
    "kubernetes.gpus", severity="error", raised_by="torch",
    evidence=f"{_DOCUMENTATION}: Schedule GPUs; kubernetes/kubernetes:pkg/apis/core/validation/validation.go 1.33",
)  # fmt: skip
def gpus(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """More processes than a pod has GPUs, or GPUs that are asked for in requests alone."""
    for file, workload in _of(files) if plan is None else ():
        for container in _containers(workload):
            wanted, limit = container.resource("requests", _GPU), container.resource("limits", _GPU)
            if wanted is not None and str(wanted) != str(limit):
                what = "and no limit" if limit is None else f"and a limit of {limit}"
                message = f"{wanted} of {_GPU} in requests {what}: the API refuses the pod."
                path = (*container.path, "resources", "requests", _GPU)
                fix = f"Write the same number under limits: {_GPU}: {wanted}."
                yield hit(file, path, message, fix, raised_by="nobody")
    for workload, container, inner in of_containers(files) if plan is None else ():
        limit = str(container.resource("limits", _GPU))
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


@rule(
    "kubernetes.shared-memory", severity="memory", raised_by="torch",
    evidence=f"{_DOCUMENTATION}: emptyDir, medium Memory; NCCL 2.27 documentation, Troubleshooting: shared memory",
)  # fmt: skip
def shared_memory(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A pod of several GPUs with 64 MiB at /dev/shm, where NCCL and the workers of loaders pass tensors on."""
    for file, workload in _of(files) if plan is None else ():
        for each in workload.kinds:
            for container in each.containers:
                count = str(container.resource("limits", _GPU))
                few = not count.isdecimal() or int(count) < 2
                if few or _has_shared_memory(each, container) or not _trains(workload, container):
                    continue
                message = "/dev/shm has 64 MiB here, which NCCL and the workers of loaders run out of (bus error)."
                fix = "Mount an emptyDir with medium: Memory at /dev/shm."
                yield hit(file, (*container.path, "name"), message, fix)


def _has_shared_memory(each: Pods, container: Container) -> bool:
    mounts = container.value.get("volumeMounts")
    places = [str(mount.get("mountPath")).rstrip("/") for mount in mounts or () if isinstance(mount, dict)]
    return each.spec.get("hostIPC") is True or "/dev/shm" in places


@rule(
    "kubernetes.master-address", severity="hang", raised_by="nobody",
    evidence=f"{_OPERATOR}; {_DOCUMENTATION}: DNS for Services and Pods",
)  # fmt: skip
def master_address(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A MASTER_ADDR that each pod takes for itself, that no name is made for, or that the operator sets itself."""
    for file, workload in _of(files) if plan is None else ():
        for each in workload.kinds:
            for path, value in _addresses(each):
                yield from _judged(file, workload, each, path, value)


def _addresses(each: Pods) -> Iterator[tuple[Path, str]]:
    for container in each.containers:
        for path, entry in container.environment:
            if entry.get("name") == "MASTER_ADDR" and isinstance(entry.get("value"), str):
                yield (*path, "value"), entry["value"]


def _judged(file: File, workload: Workload, each: Pods, path: Path, value: str) -> Iterator[Hit]:
    if workload.kind == "PyTorchJob" and any(pods.role == "Master" for pods in workload.pods):
        message = f"MASTER_ADDR={value} isn't used: the operator of PyTorchJob adds its own behind it."
        yield hit(file, path, message, "Leave it out.", severity="info")
    elif _LOCAL.fullmatch(value) and (workload.count or 1) > 1:
        message = f"MASTER_ADDR={value} is each of the {workload.count} pods itself: they never meet."
        yield hit(file, path, message, "Name the first pod: JOB-0.SERVICE, with a headless Service.")
    elif workload.kind == "Job" and is_told(value) and not each.spec.get("subdomain"):
        name = str(workload.value.get("metadata", {}).get("name"))
        if re.fullmatch(rf"{re.escape(name)}-0\.[\w.-]+", value):
            message = f"{value} is a name only where the pods have that subdomain: they look for it in vain."
            fix = f"Add subdomain: {value.split('.')[1]} to the pods, and a headless Service of that name."
            yield hit(file, path, message, fix)


@rule(
    "kubernetes.refused", severity="error", raised_by="nobody",
    evidence=f"{_API}; {_OPERATOR}, pytorch_validation.go",
)  # fmt: skip
def refused(plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What the API server, or the operator of PyTorchJob, doesn't take."""
    for file, workload in _of(files) if plan is None else ():
        for each in workload.kinds:
            yield from _restart(file, workload, each)
            for container in each.containers:
                for path, entry in container.environment:
                    if isinstance(entry.get("value"), (bool, int, float)):
                        message = f"the value of {entry.get('name')} is no text: the API refuses the object."
                        yield hit(file, (*path, "value"), message, "Put it in quotes.")
            if workload.kind == "PyTorchJob" and each.containers:
                yield from _of_operator(file, each)


def _restart(file: File, workload: Workload, each: Pods) -> Iterator[Hit]:
    policy = each.spec.get("restartPolicy")
    by_default = policy is None and workload.kind == "JobSet"  # its webhook writes OnFailure
    refuses = policy not in ("Never", "OnFailure") and is_told(str(policy)) and not by_default
    if workload.kind in ("Job", "JobSet") and refuses:
        what = f"restartPolicy: {policy}" if policy else "no restartPolicy, which is Always,"
        message = f"{what} in a Job: the API takes Never or OnFailure."
        yield hit(file, (*each.path, "restartPolicy"), message, "Write restartPolicy: Never.")


def _of_operator(file: File, each: Pods) -> Iterator[Hit]:
    if not any(container.value.get("name") == "pytorch" for container in each.containers):
        message = "no container is called pytorch: the operator takes no PyTorchJob without one."
        yield hit(file, (*each.containers[0].path, "name"), message, "Call the container pytorch.")
    if each.role == "Master" and each.count not in (1, None):
        message = f"{each.count} pods are Master: the operator takes one."
        yield hit(file, (*each.above, "replicas"), message, "Write replicas: 1, and the others under Worker.")
