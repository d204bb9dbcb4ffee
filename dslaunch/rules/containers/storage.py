"""What pods mount: shared memory, claims, and the keys of ConfigMaps and Secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import Container, Pods, Workload, as_dict, as_list, documents, get, workloads
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.quantities import amount
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_DOCUMENTATION = "the documentation of Kubernetes 1.33"
_GPU = "nvidia.com/gpu"
_LAUNCHER = re.compile(r"\b(?:torchrun|deepspeed|accelerate launch|torch\.distributed)\b")
_WORKERS = re.compile(r"--(?:dataloader_)?num[_-]workers[= ]+['\"]?([1-9]\d*)")
_LITTLE = 1 << 30
"""Bytes of shared memory that several GPUs run out of: NCCL takes some 32 MiB for each pair alone."""
_ONE_NODE = ("ReadWriteOnce", "ReadWriteOncePod")


@rule(
    "kubernetes.shared-memory", severity="memory", raised_by="torch",
    evidence=f"{_DOCUMENTATION}: emptyDir, medium Memory; NCCL 2.27 documentation, Troubleshooting: shared memory",
)  # fmt: skip
def shared_memory(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Too little at /dev/shm, which NCCL and loaders fill, or more there than the container may take."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            for each in workload.kinds:
                for container in each.containers:
                    yield from _of_memory(file, workload, each, container)


def _of_memory(file: File, workload: Workload, each: Pods, container: Container) -> Iterator[Hit]:
    count = str(container.resource("limits", _GPU))
    several = count.isdecimal() and int(count) > 1 and _trains(workload, container)
    mounted = _mounted(each, container)
    if mounted is None:
        words = " ".join(word for _, word in container.words)
        loads = _WORKERS.search(words) if _trains(workload, container) else None
        if (several or loads) and each.spec.get("hostIPC") is not True:
            message = "/dev/shm has 64 MiB here, which NCCL and the workers of loaders run out of (bus error)."
            fix = "Mount an emptyDir with medium: Memory at /dev/shm."
            yield hit(file, (*container.path, "name"), message, fix)
        return
    path, volume = mounted
    size, limit = amount(get(volume, "emptyDir", "sizeLimit")), amount(container.resource("limits", "memory"))
    here = (*path, "emptyDir", "sizeLimit")
    if size is None or "emptyDir" not in volume:
        return
    if several and size < _LITTLE:
        message = f"/dev/shm has {get(volume, 'emptyDir', 'sizeLimit')} for {count} GPUs: NCCL runs out of it."
        yield hit(file, here, message, "Write sizeLimit: 16Gi or more.")
    elif limit is not None and size >= limit and get(volume, "emptyDir", "medium") == "Memory":
        message = (
            f"/dev/shm may take {get(volume, 'emptyDir', 'sizeLimit')}, and counts for the container's memory, of "
            f"which it has {container.resource('limits', 'memory')}: it is killed before that is full."
        )
        yield hit(file, here, message, "Write less, or give the container more memory.")


def _trains(workload: Workload, container: Container) -> bool:
    """Whether a container is one rank, or starts ranks."""
    words = " ".join(word for _, word in container.words)
    return workload.kind == "PyTorchJob" or _LAUNCHER.search(words) is not None


def _mounted(each: Pods, container: Container) -> tuple[Path, Mapping[str, Any]] | None:
    """The volume at /dev/shm, with its place; None where nothing is mounted there."""
    for mount in as_list(container.value.get("volumeMounts")):
        if str(get(mount, "mountPath")).rstrip("/") == "/dev/shm":
            for index, volume in enumerate(as_list(each.spec.get("volumes"))):
                if get(volume, "name") == get(mount, "name"):
                    return (*each.path, "volumes", index), as_dict(volume)
            return (), {}
    return None


@rule(
    "kubernetes.claim", severity="hang", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: Persistent Volumes, Access Modes",
)  # fmt: skip
def claim(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A claim that one node alone may mount, and pods of a training on several."""
    claims = {
        _called(each): each
        for file in files.of("kubernetes") for _, each in documents(file.value)
        if each.get("kind") == "PersistentVolumeClaim"
    }  # fmt: skip
    for file in files.of("kubernetes") if claims else ():
        for workload in workloads(file.value):
            alone = workload.kind in ("LeaderWorkerSet", "DaemonSet")
            for each in workload.kinds if (workload.count or 0) > 1 and not alone else ():
                yield from _of_claims(file, workload, each, claims)


def _called(each: Mapping[str, Any]) -> tuple[str, str]:
    """Name and namespace of an object."""
    return str(get(each, "metadata", "name")), str(get(each, "metadata", "namespace") or "")


def _of_claims(
    file: File, workload: Workload, each: Pods, claims: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[Hit]:
    gpus = [amount(container.resource("limits", _GPU)) for container in each.containers]
    if not any(gpus):
        return  # they may stand on one node
    for index, volume in enumerate(as_list(each.spec.get("volumes"))):
        name = get(volume, "persistentVolumeClaim", "claimName")
        spec = as_dict(claims.get((str(name), workload.namespace), {}).get("spec"))
        modes = as_list(spec.get("accessModes"))
        if modes and all(mode in _ONE_NODE for mode in modes):
            message = (
                f"the claim {name} is {modes[0]}, which one node may mount: of {workload.count} pods those on "
                "other nodes wait for it."
            )
            path = (*each.path, "volumes", index, "persistentVolumeClaim", "claimName")
            yield hit(file, path, message, "Ask for ReadWriteMany (NFS, CephFS, FSx), or write nothing there.")


@rule(
    "kubernetes.key", severity="error", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: Configure a Pod to Use a ConfigMap, Restrictions",
)  # fmt: skip
def key(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A key that the ConfigMap or Secret among the files doesn't have, or a script in one that may not be run."""
    data = {
        (str(each.get("kind")), *_called(each)): {
            str(name) for part in ("data", "binaryData", "stringData") for name in as_dict(each.get(part))
        }
        for file in files.of("kubernetes") for _, each in documents(file.value)
        if each.get("kind") in ("ConfigMap", "Secret")
    }  # fmt: skip
    for file in files.of("kubernetes") if data else ():
        for workload in workloads(file.value):
            for each in workload.kinds:
                maps = {name: keys for (kind, name, space), keys in data.items()
                        if kind == "ConfigMap" and space == workload.namespace}  # fmt: skip
                yield from _of_files(file, each, maps)
                for path, kind, name, wanted in _asked(each):
                    keys = data.get((kind, name, workload.namespace))
                    if keys and wanted not in keys and "$" not in wanted and "{" not in wanted:
                        message = f"the {kind} {name} has no key {wanted}: the container isn't started."
                        yield hit(file, path, message, f"It has {', '.join(sorted(keys))}.")


def _of_files(file: File, each: Pods, keys_of: Mapping[str, set[str]]) -> Iterator[Hit]:
    """Files of a mounted ConfigMap that a command names: without the right to run them, or that aren't there."""
    sources = {str(get(one, "name")): as_dict(get(one, "configMap")) for one in as_list(each.spec.get("volumes"))}
    for container in each.containers:
        for mount in as_list(container.value.get("volumeMounts")):
            source, place = sources.get(str(get(mount, "name"))), str(get(mount, "mountPath")).rstrip("/")
            if not source or get(mount, "subPath") is not None or not place:
                continue
            mode, first = source.get("defaultMode"), next(iter(container.words), None)
            if first and first[1].startswith(f"{place}/") and not source.get("items") and not _runs(mode):
                message = f"{first[1]} has the mode 0644 that files of a ConfigMap have: permission denied."
                yield hit(file, first[0], message, f"Write defaultMode: 0755, or [bash, {first[1]}].")
            keys = keys_of.get(str(source.get("name")), set())
            for path, word in container.words if keys and not source.get("items") else ():
                for found in re.finditer(rf"(?<![\w/.-]){re.escape(place)}/([\w.-]+)(?![\w/*$-])", word):
                    if found[1].rstrip(".") not in keys:
                        message = f"{found[0]} is not there: the ConfigMap {source.get('name')} has no such key."
                        yield hit(file, path, message, f"It has {', '.join(sorted(keys))}.")


def _runs(mode: object) -> bool:
    """Whether a mode lets its files be run; not told where it is no number."""
    return mode is not None and (not isinstance(mode, int) or mode & 0o111 != 0)


def _asked(each: Pods) -> Iterator[tuple[Path, str, str, str]]:
    """Where a key is asked for: the kind, the name, and the key."""
    volumes: dict[str, tuple[str, str]] = {}
    for index, volume in enumerate(as_list(each.spec.get("volumes"))):
        for kind, part, field in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            source = as_dict(get(volume, part))
            items = as_list(source.get("items"))
            if source.get("optional") is True or not source:
                continue
            for at, item in enumerate(items):
                path = (*each.path, "volumes", index, part, "items", at, "key")
                yield path, kind, str(source.get(field)), str(get(item, "key"))
            if not items:
                volumes[str(get(volume, "name"))] = (kind, str(source.get(field)))
    for container in each.all_containers:
        for path, entry in container.environment:
            for kind, part in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                source = as_dict(get(entry, "valueFrom", part))
                if source and source.get("optional") is not True:
                    here = (*path, "valueFrom", part, "key")
                    yield here, kind, str(source.get("name")), str(source.get("key"))
        for at, mount in enumerate(as_list(container.value.get("volumeMounts"))):
            sub, named = get(mount, "subPath"), volumes.get(str(get(mount, "name")))
            if isinstance(sub, str) and named is not None and "/" not in sub:
                yield (*container.path, "volumeMounts", at, "subPath"), *named, sub
