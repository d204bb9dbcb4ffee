"""Kubernetes objects that start pods, as their manifests say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.files.position import Path

_SPECS = {"PyTorchJob": "pytorchReplicaSpecs", "MPIJob": "mpiReplicaSpecs"}
_GROUPS = (
    "apps", "batch", "batch.volcano.sh", "jobset.x-k8s.io", "kubeflow.org", "leaderworkerset.x-k8s.io", "v1",
)  # fmt: skip
"""Those of the kinds here; other groups have objects of the same names."""
_PLAIN = ("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet")
_VOLCANO = "batch.volcano.sh"


@dataclass(frozen=True)
class Container:
    """One container of a pod."""

    path: Path
    value: Mapping[str, Any]

    @property
    def words(self) -> tuple[tuple[Path, str], ...]:
        """What it runs: `command`, and `args` behind it, each with its place."""
        return tuple(
            ((*self.path, key, index), word)
            for key in ("command", "args")
            for index, word in enumerate(as_list(self.value.get(key)))
            if isinstance(word, str)
        )

    @property
    def environment(self) -> tuple[tuple[Path, Mapping[str, Any]], ...]:
        """The entries of `env`, each with its place."""
        entries = enumerate(as_list(self.value.get("env")))
        return tuple(((*self.path, "env", index), each) for index, each in entries if isinstance(each, dict))

    def resource(self, kind: str, name: str) -> object:
        """What `resources` gives under `limits` or `requests`; None where it gives nothing."""
        return get(self.value, "resources", kind, name)


@dataclass(frozen=True)
class Pods:
    """Pods made alike."""

    role: str
    """Master, Worker, Launcher, the name of a replicated job; empty where there is one kind."""
    count: int | None
    """How many run at a time; None where the manifest doesn't say."""
    path: Path
    """Of their `spec`."""
    spec: Mapping[str, Any]
    above: Path
    """Of what they are made by: a Job's or StatefulSet's `spec`, or one of the replica specs."""
    maker: Mapping[str, Any]

    @property
    def containers(self) -> tuple[Container, ...]:
        """Those that run side by side."""
        path = (*self.path, "containers")
        found = enumerate(as_list(self.spec.get("containers")))
        return tuple(Container((*path, index), each) for index, each in found if isinstance(each, dict))

    @property
    def all_containers(self) -> tuple[Container, ...]:
        """Those that run before them, and they."""
        path = (*self.path, "initContainers")
        found = enumerate(as_list(self.spec.get("initContainers")))
        before = tuple(Container((*path, index), each) for index, each in found if isinstance(each, dict))
        return before + self.containers

    @property
    def labels(self) -> Mapping[str, Any]:
        """What a Service's selector is held against."""
        return as_dict(get(self.maker, "template", "metadata", "labels"))


@dataclass(frozen=True)
class Workload:
    """One object that starts pods."""

    kind: str
    """Job | CronJob | JobSet | PyTorchJob | MPIJob | LeaderWorkerSet | VolcanoJob | StatefulSet | Deployment |
    ReplicaSet | DaemonSet | Pod"""
    path: Path
    value: Mapping[str, Any]
    pods: tuple[Pods, ...]

    @property
    def kinds(self) -> tuple[Pods, ...]:
        """Its pods, those of one anchor (`template: *pod`) once."""
        return tuple({id(each.spec): each for each in reversed(self.pods)}.values())

    @property
    def name(self) -> str:
        """Of the object; empty where it has none."""
        return str(get(self.value, "metadata", "name") or "")

    @property
    def namespace(self) -> str:
        """That it is made in; empty where whoever applies it says that."""
        return str(get(self.value, "metadata", "namespace") or "")

    @property
    def count(self) -> int | None:
        """All its pods; None where one number isn't told."""
        counts = [each.count for each in self.pods]
        return sum(each or 0 for each in counts) if counts and None not in counts else None


def documents(value: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The objects of a file, those of a List too, each with its place."""
    several = [((index,), each) for index, each in enumerate(as_list(value))]
    for path, each in [((), value)] if isinstance(value, dict) else several:
        if isinstance(each, dict) and each.get("kind") == "List":
            inside = enumerate(as_list(each.get("items")))
            yield from (((*path, "items", index), item) for index, item in inside if isinstance(item, dict))
        elif isinstance(each, dict):
            yield path, each


def workloads(value: Any) -> Iterator[Workload]:
    """The objects of a file that start pods."""
    for path, each in documents(value):
        kind = str(each.get("kind"))
        group = str(each.get("apiVersion")).partition("/")[0]
        if group not in _GROUPS:
            continue
        kind = "VolcanoJob" if group == _VOLCANO and kind == "Job" else kind
        if pods := tuple(_pods(kind, each, (*path, "spec"))):
            yield Workload(kind, path, each, pods)


def _pods(kind: str, each: Mapping[str, Any], path: Path) -> Iterator[Pods]:
    spec = as_dict(each.get("spec"))
    if kind == "Pod":
        yield Pods("", 1, path, spec, path, {**spec, "template": {"metadata": each.get("metadata")}})
    elif kind == "Job":
        yield _of_job("", spec, path, 1)
    elif kind == "CronJob":
        job = as_dict(get(spec, "jobTemplate", "spec"))
        yield _of_job("", job, (*path, "jobTemplate", "spec"), 1)
    elif kind == "VolcanoJob":
        for index, task in enumerate(as_list(spec.get("tasks"))):
            own = as_dict(task)
            yield _made(str(own.get("name")), own, (*path, "tasks", index), _number(own.get("replicas"), 1))
    elif kind == "LeaderWorkerSet":
        yield from _of_group(as_dict(spec.get("leaderWorkerTemplate")), (*path, "leaderWorkerTemplate"))
    elif kind == "JobSet":
        for index, replicated in enumerate(as_list(spec.get("replicatedJobs"))):
            own = as_dict(replicated)
            job = as_dict(get(own, "template", "spec"))
            inside = (*path, "replicatedJobs", index, "template", "spec")
            yield _of_job(str(own.get("name")), job, inside, _number(own.get("replicas"), 1))
    elif kind in _PLAIN:
        one = kind == "DaemonSet"  # as many as there are nodes
        yield _made("", spec, path, None if one else _number(spec.get("replicas"), 1))
    elif kind in _SPECS:
        for role, replicas in as_dict(spec.get(_SPECS[kind])).items():
            own = as_dict(replicas)
            yield _made(str(role), own, (*path, _SPECS[kind], str(role)), _number(own.get("replicas"), 1))


def _of_job(role: str, job: Mapping[str, Any], path: Path, times: int | None) -> Pods:
    """The pods of a Job, or of `times` Jobs alike."""
    parallel = _number(job.get("parallelism"), 1)
    count = parallel * times if parallel is not None and times is not None else None
    return _made(role, job, path, count)


def _of_group(group: Mapping[str, Any], path: Path) -> Iterator[Pods]:
    """The pods of one group of a LeaderWorkerSet: each group trains for itself."""
    size = _number(group.get("size"), 1)
    workers = None if size is None else max(size - 1, 0)
    for role, key in (("leader", "leaderTemplate"), ("worker", "workerTemplate")):
        template = as_dict(group.get(key))
        if template:
            alone = key == "workerTemplate" and "leaderTemplate" not in group
            count = size if alone else 1 if role == "leader" else workers
            spec = as_dict(template.get("spec"))
            yield Pods(role, count, (*path, key, "spec"), spec, path, {"template": template})


def _made(role: str, maker: Mapping[str, Any], path: Path, count: int | None) -> Pods:
    return Pods(role, count, (*path, "template", "spec"), as_dict(get(maker, "template", "spec")), path, maker)


def _number(value: object, default: int) -> int | None:
    """A whole number; None where it is anything else, such as a template's gap."""
    return default if value is None else value if type(value) is int and value >= 0 else None


def get(value: object, *path: str) -> object:
    """The value at `path`; None where it isn't there."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
