"""kubernetes.yaml: a ConfigMap with the run's files, and the job whose pods read them, one pod a node.

PyTorchJob: kubeflow.org/v1 of kubeflow/training-operator v1.9.0, which sets RANK (here: of the pod), MASTER_ADDR
and MASTER_PORT in each container named `pytorch` (pkg/controller.v1/pytorch/envvar.go). JobSet:
jobset.x-k8s.io/v1alpha2 of kubernetes-sigs/jobset v0.9.1; a pod is reached as JOBSET-JOB-INDEX-PODINDEX.JOBSET,
and the Job controller sets JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.schema.config import RunConfig
from dslaunch.schema.kubernetes import Kubernetes

FILE = "kubernetes.yaml"
_NOT_MOUNTED = {"job.sbatch", "prediction.json", "preflight.json", "hostfile", "ds_env"}
_FILES = "/etc/dslaunch"
_GPU = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
_PORT = 29500
_MOST_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB; its own words need some of it."""
_NODE = {
    "pytorchjob": (
        'DSLAUNCH_NODE_RANK="$RANK" DSLAUNCH_MASTER_ADDR="$MASTER_ADDR" DSLAUNCH_MASTER_PORT="$MASTER_PORT"'
    ),
    "jobset": 'DSLAUNCH_NODE_RANK="$JOB_COMPLETION_INDEX"',
}
_START = """set -eu
mkdir -p "$DSLAUNCH_RUN_DIR/logs"
for file in {files}/*; do # each appears whole, for another pod may be reading it
  cp "$file" "$DSLAUNCH_RUN_DIR/.$HOSTNAME"
  mv "$DSLAUNCH_RUN_DIR/.$HOSTNAME" "$DSLAUNCH_RUN_DIR/${{file##*/}}"
done
export {node}
exec bash "$DSLAUNCH_RUN_DIR/launch.sh"
"""


def job_name(plan: Plan) -> str:
    """Of the job and its ConfigMap: the plan's name as Kubernetes takes one, short enough for the pods' names."""
    return re.sub(r"[^a-z0-9]+", "-", plan.name.lower()).strip("-")[:40].strip("-")


def kubernetes_manifests(plan: Plan, config: RunConfig, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The documents of kubernetes.yaml.

    Args:
        files: what is rendered beside it, name: text.

    Raises:
        ConfigError: no image, no Secret for launcher.pass_env, or files too large for a ConfigMap.
    """
    wanted = config.launcher.kubernetes
    if not wanted.image:
        raise ConfigError("launcher.kubernetes.image: is empty. Name the image that training runs in")
    if plan.launcher.pass_env and not wanted.secret:
        raise ConfigError(
            "launcher.kubernetes.secret: is empty, but launcher.pass_env names variables. Put them into a Secret "
            "(kubectl create secret generic NAME --from-literal=...), and give its name"
        )
    mounted = {name: text for name, text in files.items() if name not in _NOT_MOUNTED}
    size = sum(len(text.encode()) for text in mounted.values())
    if size > _MOST_BYTES:
        raise ConfigError(
            f"launcher.name=kubernetes: the files have {size} bytes, and a ConfigMap holds {_MOST_BYTES}. "
            "Launch this plan through another launcher"
        )
    metadata = {"name": job_name(plan), **({"namespace": wanted.namespace} if wanted.namespace else {})}
    labels = {"labels": {"kueue.x-k8s.io/queue-name": wanted.queue}} if wanted.queue else {}
    job = {"metadata": {**metadata, **labels}, **_JOBS[wanted.kind](plan, wanted)}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": mounted}, job]


def _pytorchjob(plan: Plan, wanted: Kubernetes) -> dict[str, Any]:
    nodes = plan.cluster.nodes
    replica = {"restartPolicy": "Never", "template": {"spec": _pod(plan, wanted)}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "spec": {
            "nprocPerNode": str(plan.cluster.gpus_per_node),
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _jobset(plan: Plan, wanted: Kubernetes) -> dict[str, Any]:
    nodes = plan.cluster.nodes
    pod = {**_pod(plan, wanted), "restartPolicy": "Never"}
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
    }


_JOBS = {"pytorchjob": _pytorchjob, "jobset": _jobset}


def _pod(plan: Plan, wanted: Kubernetes) -> dict[str, Any]:
    name = job_name(plan)
    claim = (
        {"persistentVolumeClaim": {"claimName": wanted.volume_claim}}
        if wanted.volume_claim
        else {"emptyDir": {}}
    )
    optional = {"nodeSelector": dict(wanted.node_selector), "serviceAccountName": wanted.service_account}
    return {
        **{key: value for key, value in optional.items() if value},
        "containers": [_container(plan, wanted)],
        "volumes": [
            {"name": "files", "configMap": {"name": name}},
            {"name": "run", **claim},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shared_memory}},
        ],
    }


def _container(plan: Plan, wanted: Kubernetes) -> dict[str, Any]:
    name, cluster = job_name(plan), plan.cluster
    env = {"DSLAUNCH_RUN_DIR": f"{wanted.mount}/{name}"}
    if wanted.kind == "jobset":
        port = str(plan.launcher.master_port or _PORT)
        env |= {"DSLAUNCH_MASTER_ADDR": f"{name}-node-0-0.{name}", "DSLAUNCH_MASTER_PORT": port}
    gpus = {_GPU[cluster.accelerator]: str(cluster.gpus_per_node)} if cluster.accelerator in _GPU else {}
    asked = {**wanted.resources, **gpus}
    return {
        "name": "pytorch",
        "image": wanted.image,
        "command": ["bash", "-c", _START.format(files=_FILES, node=_NODE[wanted.kind])],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        **({"envFrom": [{"secretRef": {"name": wanted.secret}}]} if wanted.secret else {}),
        **({"resources": {"limits": asked, "requests": asked}} if asked else {}),
        "volumeMounts": [
            {"name": "files", "mountPath": _FILES, "readOnly": True},
            {"name": "run", "mountPath": wanted.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
