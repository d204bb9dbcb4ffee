"""What the API server, or an operator, doesn't take of a manifest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.manifest import Container, Pods, Workload, as_dict, as_list, documents, get, workloads
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.fields import Found, mistyped, of_other_group, whole
from dslaunch.rules.containers.quantities import is_open, is_quantity, mended, of_resources
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_API = "kubernetes/kubernetes:pkg/apis/core/validation/validation.go, pkg/apis/batch/validation/validation.go 1.33"
_OPERATOR = "kubeflow/training-operator:pkg/webhooks/pytorch/pytorchjob_webhook.go 1.9"
_MPI = "kubeflow/mpi-operator:pkg/apis/kubeflow/validation/validation.go 0.6"
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_OLD_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_LONGEST_LABEL, _LONGEST_PORT_NAME, _LAST_PORT = 63, 15, 65535
_ALWAYS = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet")
_JOBS = ("Job", "JobSet", "CronJob")
_RESTARTS = ("Always", "OnFailure", "Never")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "restartPolicy": _RESTARTS,
}
_MAKERS: Mapping[str, tuple[str, ...]] = {
    "completionMode": ("Indexed", "NonIndexed"), "podManagementPolicy": ("OrderedReady", "Parallel"),
}  # fmt: skip
_CLEAN = ("All", "None", "Running")
_NAMED = ("apps", "batch", "jobset.x-k8s.io", "kubeflow.org", "v1")
_ROLES: Mapping[str, tuple[str, str, str]] = {
    "MPIJob": ("mpiReplicaSpecs", "Launcher", "Worker"), "PyTorchJob": ("pytorchReplicaSpecs", "Master", "Worker"),
}  # fmt: skip
"""Where their pods stand, and the roles: the first has one pod."""


@rule("kubernetes.refused", severity="error", raised_by="nobody", evidence=f"{_API}; {_OPERATOR}; {_MPI}")
def refused(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What the API server, or the operator of PyTorchJob or MPIJob, doesn't take."""
    for file in whole(files):
        found = [*mistyped(file), *of_other_group(file), *_names(file)]
        for workload in workloads(file.value):
            for each in workload.kinds:
                found += _of_pods(workload, each)
            found += _of_operator(workload)
        for path, message, fix in dict.fromkeys(found):
            yield hit(file, path, message, fix)


def _names(file: File) -> Iterator[Found]:
    """Names of objects, and of the keys of their data."""
    for path, each in documents(file.value):
        kind, metadata = str(each.get("kind")), as_dict(each.get("metadata"))
        name, group = metadata.get("name"), str(each.get("apiVersion")).partition("/")[0]
        if isinstance(name, str) and not is_open(name) and group in _NAMED:
            if kind in ("PyTorchJob", "MPIJob", "JobSet"):
                what, right = "a letter, then lower-case letters, digits and dashes", _OLD_LABEL.fullmatch(name)
            elif kind in ("Service", "Namespace", "StatefulSet"):
                what, right = "lower-case letters, digits and dashes", _LABEL.fullmatch(name)
            else:
                what, right = "lower-case letters, digits, dashes and dots", _SUBDOMAIN.fullmatch(name)
            here = (*path, "metadata", "name")
            if not right:
                yield here, f"{name} is no name for a {kind}: {what}.", "Rename it."
            elif len(name) > _LONGEST_LABEL and kind not in ("ConfigMap", "Secret", "PersistentVolumeClaim"):
                yield here, f"{name} is longer than 63 characters.", "Write a shorter name."
        yield from _labels(metadata, (*path, "metadata"))
        if kind == "ConfigMap" and group == "v1":
            for key in as_dict(each.get("data")):
                if isinstance(key, str) and not _DATA_KEY.fullmatch(key):
                    message = f"{key} is no key of a ConfigMap: letters, digits, dashes, dots and _."
                    yield (*path, "data", key), message, "Write a plain name; items gives it a path in a volume."


def _labels(metadata: Mapping[str, Any], path: Path) -> Iterator[Found]:
    for key, value in as_dict(metadata.get("labels")).items():
        if not is_open(value) and (not _LABEL_VALUE.fullmatch(value) or len(value) > _LONGEST_LABEL):
            message = f"{value!r} is no value of a label: letters, digits, dashes, dots and _, at most 63."
            yield (*path, "labels", str(key)), message, "Put it in annotations, or shorten it."


def _of_pods(workload: Workload, each: Pods) -> Iterator[Found]:
    yield from _restart(workload, each)
    yield from _words(each)
    yield from _of_job(workload, each)
    yield from _selector(workload, each)
    yield from _labels(as_dict(get(each.maker, "template", "metadata")), (*each.path[:-1], "metadata"))
    yield from _volumes(workload, each)
    yield from _twice((each.path, "initContainers", "containers"), each.spec, "containers")
    for container in each.all_containers:
        yield from _of_container(each, container)


def _restart(workload: Workload, each: Pods) -> Iterator[Found]:
    policy = each.spec.get("restartPolicy")
    by_default = policy is None and workload.kind == "JobSet"  # its webhook writes OnFailure
    whole = policy is not None or all(container.value.get("image") for container in each.containers)
    refuses = policy not in ("Never", "OnFailure") and is_told(str(policy)) and not by_default and whole
    path = (*each.path, "restartPolicy")
    if workload.kind in _JOBS and refuses and each.containers:
        what = f"restartPolicy: {policy}" if policy else "no restartPolicy, which is Always,"
        yield path, f"{what} in a Job: the API takes Never or OnFailure.", "Write restartPolicy: Never."
    elif workload.kind in _ALWAYS and policy not in ("Always", None) and not is_open(policy):
        message = f"restartPolicy: {policy} in a {workload.kind}: the API takes Always alone."
        yield path, message, "Take it out, or make it a Job."


def _words(each: Pods) -> Iterator[Found]:
    """Values of which there are few."""
    places = [(each.spec, each.path, _WORDS), (each.maker, each.above, _MAKERS)]
    for container in each.all_containers:
        places.append((container.value, container.path, {"imagePullPolicy": ("Always", "IfNotPresent", "Never")}))
    for values, path, known in places:
        for name, words in known.items():
            value = values.get(name)
            if value is not None and not is_open(value) and value not in words:
                near = nearest(str(value), words)
                yield (*path, name), f"{name} takes {listed(words)}, not {value}.{near}", "Write one of these."


def _of_job(workload: Workload, each: Pods) -> Iterator[Found]:
    if workload.kind not in _JOBS:
        return
    wanted, at_a_time = each.maker.get("completions"), each.maker.get("parallelism")
    mode = each.maker.get("completionMode", "Indexed" if workload.kind == "JobSet" else "NonIndexed")
    if mode == "Indexed" and wanted is None and at_a_time is not None:
        message = "an Indexed Job with parallelism and no completions: the API refuses it."
        yield (*each.above, "parallelism"), message, f"Write completions: {at_a_time}."
    if each.maker.get("selector") is not None and not each.maker.get("manualSelector"):
        message = "a Job makes its selector itself: the API refuses another."
        yield (*each.above, "selector"), message, "Take it out."


def _selector(workload: Workload, each: Pods) -> Iterator[Found]:
    if workload.kind not in _ALWAYS or "template" not in each.maker:
        return
    for key, value in as_dict(get(each.maker, "selector", "matchLabels")).items():
        has = each.labels.get(key)
        if has != value and not is_open(value) and (has is None or not is_open(has)):
            what = f"have {key}: {has}" if has is not None else "don't have it"
            message = f"the selector asks for {key}: {value}, and its pods {what}: the API refuses the object."
            yield (*each.above, "selector", "matchLabels", str(key)), message, "Give the template the same labels."


def _volumes(workload: Workload, each: Pods) -> Iterator[Found]:
    """Names that `volumeMounts` names, and places that are taken twice."""
    spec = as_dict(workload.value.get("spec"))
    claims = as_list(spec.get("volumeClaimTemplates")) + as_list(
        get(spec, "leaderWorkerTemplate", "volumeClaimTemplates")
    )
    for policy in as_list(spec.get("volumeClaimPolicies")):
        claims += as_list(get(policy, "templates"))
    known = {str(get(claim, "metadata", "name")) for claim in claims}
    known |= {str(get(volume, "name")) for volume in as_list(each.spec.get("volumes"))}
    known |= _OF_OPERATOR if workload.kind == "MPIJob" else set()
    yield from _twice((each.path, "volumes"), each.spec, "volumes")
    for index, volume in enumerate(as_list(each.spec.get("volumes"))):
        empty, path = as_dict(get(volume, "emptyDir")), (*each.path, "volumes", index, "emptyDir")
        medium, size = empty.get("medium"), empty.get("sizeLimit")
        if medium and not is_open(medium) and medium != "Memory" and not str(medium).startswith("HugePages"):
            yield (*path, "medium"), f"medium takes Memory, HugePages or nothing, not {medium}.", "Write Memory."
        if isinstance(size, str) and not is_open(size) and not is_quantity(size):
            message = f"{size} is no quantity: Ki, Mi, Gi, Ti, or k, M, G, T."
            yield (*path, "sizeLimit"), message, f"Write {mended(size)}."
    whole = all(one.value.get("image") for one in each.all_containers) and workload.kind != "VolcanoJob"
    for container in each.all_containers:
        places: Counter[str] = Counter()
        for index, mount in enumerate(as_list(container.value.get("volumeMounts"))):
            name, place = get(mount, "name"), get(mount, "mountPath")
            path = (*container.path, "volumeMounts", index)
            if isinstance(name, str) and not is_open(name) and whole and name not in known:
                near = nearest(name, known)
                message = f"the pod has no volume {name}: the API refuses it.{near}"
                yield (*path, "name"), message, "Add it to volumes, or correct the name."
            if isinstance(place, str) and place:
                places[place] += 1
                if places[place] == 2:
                    yield (*path, "mountPath"), f"{place} is mounted twice: the API refuses the pod.", "Keep one."


_OF_OPERATOR = {"mpi-job-config", "mpi-job-kubectl", "ssh-auth"}
"""Volumes that the MPI operator adds to its pods (pkg/controller/mpi_job_controller.go 0.2 to 0.6)."""


def _twice(where: tuple[Any, ...], spec: Mapping[str, Any], what: str) -> Iterator[Found]:
    """Names that two of a list have."""
    seen: set[str] = set()
    for key in where[1:]:
        for index, one in enumerate(as_list(spec.get(key))):
            name = get(one, "name")
            if isinstance(name, str) and not is_open(name):
                if name in seen:
                    yield (*where[0], key, index, "name"), f"two {what} are called {name}.", "Rename one."
                elif not _LABEL.fullmatch(name) or len(name) > _LONGEST_LABEL:
                    message = f"{name} is no name: lower-case letters, digits and dashes, at most 63."
                    yield (*where[0], key, index, "name"), message, "Rename it."
                seen.add(name)


def _of_container(each: Pods, container: Container) -> Iterator[Found]:
    for path, entry in container.environment:
        if entry.get("value") not in (None, "") and entry.get("valueFrom") is not None:
            message = f"{entry.get('name')} has both value and valueFrom: the API refuses the pod."
            yield (*path, "valueFrom"), message, "Keep one."
    if container.value.get("image") in (None, "") and _is_whole(container):
        message = f"the container {container.value.get('name')} has no image: the API refuses the pod."
        yield (*container.path, "name"), message, "Add image:."
    yield from _ports(each, container)
    yield from of_resources(container)


def _is_whole(container: Container) -> bool:
    """Whether it is more than a patch of one."""
    wanted = ("command", "resources", "volumeMounts")
    return all(container.value.get(key) for key in wanted) and isinstance(container.value.get("name"), str)


def _ports(each: Pods, container: Container) -> Iterator[Found]:
    names: Counter[str] = Counter()
    for index, port in enumerate(as_list(container.value.get("ports"))):
        path = (*container.path, "ports", index)
        number, name, host = get(port, "containerPort"), get(port, "name"), get(port, "hostPort")
        if type(number) is int and not 0 < number <= _LAST_PORT:
            yield (*path, "containerPort"), f"{number} is no port.", "Write 1 to 65535."
        if isinstance(name, str) and not is_open(name):
            names[name] += 1
            if len(name) > _LONGEST_PORT_NAME or not _PORT_NAME.fullmatch(name):
                message = f"{name} is no name of a port: at most 15 lower-case letters, digits and dashes."
                yield (*path, "name"), message, "Shorten it."
            elif names[name] == 2:
                yield (*path, "name"), f"two ports are called {name}.", "Rename one."
        if each.spec.get("hostNetwork") is True and type(host) is int and host != number:
            message = f"hostPort {host} isn't containerPort {number}, which hostNetwork asks for."
            yield (*path, "hostPort"), message, f"Write {number}."


def _of_operator(workload: Workload) -> Iterator[Found]:
    if workload.kind not in _ROLES:
        return
    key, first, second = _ROLES[workload.kind]
    for each in workload.pods:
        if each.role not in (first, second):
            near = nearest(each.role, (first, second))
            message = f"{each.role} is no role in a {workload.kind}: {first} and {second} are.{near}"
            yield each.above, message, "Rename it."
        elif each.role == first and each.count not in (1, None):
            message = f"{each.count} pods are {first}: the operator takes one."
            yield (*each.above, "replicas"), message, f"Write replicas: 1, and the others under {second}."
        newest = workload.value.get("apiVersion") == "kubeflow.org/v2beta1"
        policies = ("Never", "OnFailure") if newest else (*_RESTARTS, "ExitCode")
        yield from _chosen(each.maker, "restartPolicy", policies, each.above)
        if workload.kind == "PyTorchJob" and each.containers:
            yield from _called_pytorch(each)
    spec = as_dict(workload.value.get("spec"))
    roles = {each.role for each in workload.pods}
    if workload.kind == "MPIJob" and workload.pods and "Launcher" not in roles:
        yield (*workload.path, "spec", key), "an MPIJob without a Launcher: the operator refuses it.", "Add one."
    above = (*workload.path, "spec")
    yield from _chosen(as_dict(spec.get("runPolicy")), "cleanPodPolicy", _CLEAN, (*above, "runPolicy"))
    yield from _chosen(spec, "mpiImplementation", ("Intel", "MPICH", "OpenMPI"), above)


def _chosen(values: Mapping[str, Any], name: str, words: Iterable[str], path: Path) -> Iterator[Found]:
    value = values.get(name)
    if value is not None and not is_open(value) and value not in words:
        yield (*path, name), f"{name} takes {listed(words)} here, not {value}.", "Write one of these."


def _called_pytorch(each: Pods) -> Iterator[Found]:
    if not any(container.value.get("name") == "pytorch" for container in each.containers):
        message = "no container is called pytorch: the operator takes no PyTorchJob without one."
        yield (*each.containers[0].path, "name"), message, "Call the container pytorch."
