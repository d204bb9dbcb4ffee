"""Names that DNS has for pods: those below a headless Service, and the Services themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.manifest import Pods, Workload, as_dict, as_list, documents, get
from dslaunch.files.position import Path

_OWN_LABELS = (
    "apps.kubernetes.io/", "batch.kubernetes.io/", "controller-uid", "job-name", "jobset.sigs.k8s.io/",
    "leaderworkerset.sigs.k8s.io/", "pod-template-hash", "statefulset.kubernetes.io/", "training.kubeflow.org/",
    "volcano.sh/",
)  # fmt: skip
"""Labels that controllers put on pods: what they hold isn't in the manifest."""
_MOST = 4096
"""Pods of one workload whose names are looked at."""


@dataclass(frozen=True)
class Service:
    """A Service among the files."""

    file: File
    path: Path
    name: str
    namespace: str
    headless: bool
    early: bool
    """publishNotReadyAddresses: a pod has its name before it is ready."""
    selector: Mapping[str, Any]
    ports: tuple[tuple[int, object], ...]
    """Each with its targetPort."""

    def selects(self, pods: Pods) -> bool | None:
        """Whether it stands for these pods; None where labels decide that a controller writes."""
        own = [key for key in self.selector if key.startswith(_OWN_LABELS)]
        if not self.selector:
            return None
        plain = [key for key in self.selector if key not in own]
        if any(pods.labels.get(key) != self.selector[key] for key in plain):
            return False
        return all(pods.labels.get(key) == self.selector[key] for key in own) or None


def services_of(files: FileSet) -> Iterator[Service]:
    """Every Service."""
    for file in files.of("kubernetes"):
        for path, each in documents(file.value):
            spec = as_dict(each.get("spec"))
            if each.get("kind") == "Service" and each.get("apiVersion") == "v1":
                listed = (port for port in as_list(spec.get("ports")) if type(get(port, "port")) is int)
                ports = tuple((port["port"], port.get("targetPort", port["port"])) for port in listed)
                name, namespace = get(each, "metadata", "name"), get(each, "metadata", "namespace")
                yield Service(
                    file, path, str(name), str(namespace or ""), spec.get("clusterIP") == "None",
                    spec.get("publishNotReadyAddresses") is True, as_dict(spec.get("selector")), ports,
                )  # fmt: skip


def domain_of(workload: Workload, pods: Pods) -> str:
    """The Service below which the pods have names; empty where there is none."""
    spec = as_dict(workload.value.get("spec"))
    if workload.kind == "StatefulSet":
        return str(spec.get("serviceName") or "")
    if workload.kind == "JobSet":
        return str(get(spec, "network", "subdomain") or workload.name)
    if workload.kind == "LeaderWorkerSet":
        return workload.name if get(spec, "networkConfig", "subdomainPolicy") != "UniquePerReplica" else ""
    return str(pods.spec.get("subdomain") or "")


def pod_names(workload: Workload, pods: Pods) -> frozenset[str]:
    """The names of all pods of a workload; none where they are made up, or aren't told."""
    name, spec = workload.name, as_dict(workload.value.get("spec"))
    if not name or not is_told(name) or any((each.count or 0) > _MOST for each in workload.pods):
        return frozenset()
    if workload.kind == "Pod":
        return frozenset({str(pods.spec.get("hostname") or name)})
    if workload.kind == "StatefulSet":
        start = get(spec, "ordinals", "start") or 0
        first = start if isinstance(start, int) else 0
        return frozenset(f"{name}-{first + index}" for index in range(pods.count or 1))
    if workload.kind == "Job" and pods.maker.get("completionMode") == "Indexed":
        return frozenset(f"{name}-{index}" for index in range(pods.count or 1))
    if workload.kind == "JobSet":
        return frozenset(_of_jobset(name, spec))
    if workload.kind == "LeaderWorkerSet":
        groups = spec.get("replicas", 1)
        return frozenset(f"{name}-{index}" for index in range(groups if isinstance(groups, int) else 1))
    return frozenset()


def _of_jobset(name: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """NAME-JOB-I-POD, as many as there are of each."""
    for each in as_list(spec.get("replicatedJobs")):
        job = as_dict(get(each, "template", "spec"))
        times, pods = get(each, "replicas"), job.get("completions", job.get("parallelism", 1))
        for index in range(times if isinstance(times, int) else 1):
            for pod in range(pods if isinstance(pods, int) else 1):
                yield f"{name}-{get(each, 'name')}-{index}-{pod}"
