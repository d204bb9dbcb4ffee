"""What a job on Kubernetes is made of."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dslaunch.schema.base import Part

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _label(value: str) -> str:
    if value and not _LABEL.fullmatch(value):
        raise ValueError(
            f"is {value!r}. Kubernetes takes at most 63 lower-case letters, digits and dashes within"
        )
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ":" in value:
        raise ValueError(f"is {value!r}. Give a path in the container that begins with / and has no colon")
    return value


Label = Annotated[str, AfterValidator(_label)]


class Kubernetes(Part):
    """A job on Kubernetes: one pod a node, in which torchrun starts the ranks."""

    kind: Literal["pytorchjob", "jobset"] = "pytorchjob"
    """Kubeflow's PyTorchJob, or a JobSet of Kubernetes' own special-interest group."""
    namespace: Label = ""
    """Empty: kubectl's current one."""
    image: str = ""
    """The container's image; the program and the training environment stand in it or on the volume."""
    volume_claim: Label = ""
    """A PersistentVolumeClaim that all pods mount for the run folder; without one it is lost with the pod."""
    mount: Annotated[str, AfterValidator(_absolute)] = "/workspace"
    """Where the volume is mounted; the run folder is MOUNT/NAME-OF-THE-JOB."""
    secret: Label = ""
    """A Secret that holds the variables of launcher.pass_env."""
    queue: Label = ""
    """Kueue's local queue."""
    service_account: Label = ""
    """That the pods run as; the namespace's default where it is empty."""
    shared_memory: Annotated[str, Field(pattern=r"^[1-9]\d*(Mi|Gi)$")] = "64Gi"
    """Limit of /dev/shm, which NCCL and data loaders use."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have, such as node.kubernetes.io/instance-type: p4d.24xlarge."""
    resources: dict[str, str] = {}
    """What a pod asks for beside its GPUs, such as cpu: '96', memory: 1000Gi, rdma/hca: '8'."""
