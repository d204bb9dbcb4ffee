"""The fields of Kubernetes objects: `python -m tests.real.kubernetes_fields` prints kubernetes_fields.json.

They are read out of the API's own schema, as the package kubernetes-validate holds it for each version. What
operators add are few fields, written below with the file of theirs that says them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

VERSION = "1.37.0"
ROOTS = {
    "ConfigMap": "core.v1", "CronJob": "batch.v1", "DaemonSet": "apps.v1", "Deployment": "apps.v1",
    "Job": "batch.v1", "PersistentVolumeClaim": "core.v1", "Pod": "core.v1", "ReplicaSet": "apps.v1",
    "Secret": "core.v1", "Service": "core.v1", "StatefulSet": "apps.v1",
}  # fmt: skip
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_EITHER = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_OBJECT = {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta", "status": "any"}
_RUN_POLICY = {
    "activeDeadlineSeconds": "integer", "backoffLimit": "integer", "cleanPodPolicy": "string",
    "managedBy": "string", "schedulingPolicy": "any", "suspend": "boolean", "ttlSecondsAfterFinished":
    "integer",
}  # fmt: skip
OPERATORS: Mapping[str, Mapping[str, str]] = {
    # kubeflow/training-operator:pkg/apis/kubeflow.org/v1/{pytorch,common}_types.go 1.9; what pytorch-operator had
    # beside them is taken too
    "PyTorchJob": {**_OBJECT, "spec": "PyTorchJobSpec"},
    "PyTorchJobSpec": {
        "activeDeadlineSeconds": "integer", "backoffLimit": "integer", "cleanPodPolicy": "string",
        "elasticPolicy": "ElasticPolicy", "nprocPerNode": "string", "pytorchReplicaSpecs":
        "{}ReplicaSpec", "runPolicy": "RunPolicy", "ttlSecondsAfterFinished": "integer",
    },
    "ElasticPolicy": {
        "maxReplicas": "integer", "maxRestarts": "integer", "metrics": "any", "minReplicas": "integer",
        "nProcPerNode": "integer", "rdzvBackend": "string", "rdzvConf": "[]RdzvConf", "rdzvHost":
        "string", "rdzvId": "string", "rdzvPort": "integer", "standalone": "boolean",
    },
    "RdzvConf": {"key": "string", "value": "string"},
    "ReplicaSpec": {"replicas": "integer", "restartPolicy": "string", "template": "PodTemplateSpec"},
    "RunPolicy": _RUN_POLICY,
    # kubeflow/mpi-operator:manifests/base/kubeflow.org_mpijobs.yaml 0.6 (v2beta1)
    "MPIJob": {**_OBJECT, "spec": "MPIJobSpec"},
    "MPIJobSpec": {
        "launcherCreationPolicy": "string", "mpiImplementation": "string", "mpiReplicaSpecs":
        "{}ReplicaSpec", "runLauncherAsWorker": "boolean", "runPolicy": "RunPolicy", "slotsPerWorker":
        "integer", "sshAuthMountPath": "string",
    },
    # kubernetes-sigs/jobset:config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml 0.10 (v1alpha2)
    "JobSet": {**_OBJECT, "spec": "JobSetSpec"},
    "JobSetSpec": {
        "coordinator": "any", "failurePolicy": "JobSetFailurePolicy", "managedBy": "string", "network":
        "JobSetNetwork", "replicatedJobs": "[]ReplicatedJob", "startupPolicy": "any", "successPolicy":
        "any", "suspend": "boolean", "ttlSecondsAfterFinished": "integer", "volumeClaimPolicies": "any",
    },
    "JobSetFailurePolicy": {"maxRestarts": "integer", "restartStrategy": "string", "rules": "any"},
    "JobSetNetwork": {
        "enableDNSHostnames": "boolean", "publishNotReadyAddresses": "boolean", "subdomain": "string",
    },
    "ReplicatedJob": {
        "dependsOn": "any", "groupName": "string", "name": "string", "replicas": "integer", "template":
        "JobTemplateSpec",
    },
    # kubernetes-sigs/lws:config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml 0.7 (v1)
    "LeaderWorkerSet": {**_OBJECT, "spec": "LwsSpec"},
    "LwsSpec": {
        "leaderWorkerTemplate": "LeaderWorkerTemplate", "networkConfig": "any", "replicas": "integer",
        "rolloutStrategy": "any", "startupPolicy": "string",
    },
    "LeaderWorkerTemplate": {
        "leaderTemplate": "PodTemplateSpec", "persistentVolumeClaimRetentionPolicy": "any",
        "restartPolicy": "string", "size": "integer", "subGroupPolicy": "any", "volumeClaimTemplates":
        "any", "workerTemplate": "PodTemplateSpec",
    },
    # volcano-sh/volcano:config/crd/volcano/bases/batch.volcano.sh_jobs.yaml 1.13 (batch.volcano.sh/v1alpha1)
    "VolcanoJob": {**_OBJECT, "spec": "VolcanoJobSpec"},
    "VolcanoJobSpec": {
        "maxRetry": "integer", "minAvailable": "integer", "minSuccess": "integer", "networkTopology":
        "any", "plugins": "{}[]string", "policies": "any", "priorityClassName": "string", "queue":
        "string", "runningEstimate": "string", "schedulerName": "string", "tasks": "[]VolcanoTask",
        "ttlSecondsAfterFinished": "integer", "volumes": "any",
    },
    "VolcanoTask": {
        "dependsOn": "any", "maxRetry": "integer", "minAvailable": "integer", "name": "string",
        "partitionPolicy": "any", "policies": "any", "replicas": "integer", "template":
        "PodTemplateSpec", "topologyPolicy": "string",
    },
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The definitions of the API, by their full names."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}-local"
    return dict(json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"])


def needed(definitions: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """The fields that each of these types can't be without."""
    short = {_short(name): sorted(each.get("required", [])) for name, each in definitions.items() if _is_of(name)}
    return {name: short[name] for name in sorted(names) if short.get(name)}


def _is_of(name: str) -> bool:
    return name.startswith(("io.k8s.api.core.v1.", "io.k8s.api.apps.v1.", "io.k8s.api.batch.v1."))


def table(definitions: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Each type that an object of a training can hold: its fields, and what they take."""
    found: dict[str, dict[str, str]] = {}
    waiting = [f"io.k8s.api.{group}.{kind}" for kind, group in ROOTS.items()]
    waiting += ["io.k8s.api.batch.v1.JobTemplateSpec"]
    while waiting:
        name = waiting.pop()
        if _short(name) not in found and "properties" in definitions[name]:
            fields = definitions[name]["properties"]
            found[_short(name)] = {field: _type(each) for field, each in sorted(fields.items())}
            waiting += [ref for each in fields.values() for ref in _references(each)]
    return {**found, **{name: dict(fields) for name, fields in OPERATORS.items()}}


def _type(field: Mapping[str, Any]) -> str:
    if ref := field.get("$ref"):
        full = ref.rpartition("/")[2]
        return {_QUANTITY: "quantity", _EITHER: "integer or string"}.get(full, _short(full))
    kinds = field.get("type", "any")
    kind = next(each for each in ([kinds] if isinstance(kinds, str) else kinds) if each != "null")
    if kind == "array":
        return "[]" + _type(field["items"])
    if kind == "object":
        inner = field.get("additionalProperties")
        return "{}" + _type(inner) if isinstance(inner, dict) else "any"
    return str(kind)


def _references(field: Mapping[str, Any]) -> Iterator[str]:
    for value in (field, field.get("items"), field.get("additionalProperties")):
        if isinstance(value, dict) and "$ref" in value:
            full = value["$ref"].rpartition("/")[2]
            if full not in (_QUANTITY, _EITHER):
                yield full


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> None:
    definitions = schema()
    rows = table(definitions)
    lines = (f"{json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in sorted(rows.items()))
    lacking = needed(definitions, rows).items()
    wanted = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in lacking)
    head, types = f'"version": "{VERSION}", "types": {{\n', ",\n".join(lines)
    print("{" + head + types + f'\n}}, "needed": {{\n{wanted}\n}}}}')


if __name__ == "__main__":
    main()
