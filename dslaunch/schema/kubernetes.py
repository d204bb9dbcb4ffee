"""What a job on Kubernetes is made of."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from dslaunch.schema.base import Part

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:))(?::\d+)?/)?{_PART}(?:/{_PART})*"
    r"(?::\w[\w.-]{0,127})?(?:@[A-Za-z]\w*(?:[-_+.]\w+)*:[0-9a-fA-F]{32,})?"
)
"""distribution/reference:regexp.go 0.6; what the kubelet reads an image's name with."""
_MEMORY = re.compile(r"[1-9]\d*(Mi|Gi)")
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
"""kubernetes/apimachinery:pkg/api/resource/quantity.go 0.33, without a sign."""


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


def _image(value: str) -> str:
    if value and not _IMAGE.fullmatch(value):
        raise ValueError(
            f"is {value!r}. An image is [REGISTRY/]NAME[:TAG][@DIGEST], its name in lower-case letters and "
            "digits, with . _ - / within"
        )
    return value


def _memory(value: str) -> str:
    if not _MEMORY.fullmatch(value):
        raise ValueError(f"is {value!r}. Kubernetes takes a whole number and Mi or Gi, such as 64Gi")
    return value


def _quantities(value: dict[str, str]) -> dict[str, str]:
    for name, quantity in value.items():
        if not _QUANTITY.fullmatch(quantity):
            raise ValueError(
                f"{name} is {quantity!r}. Kubernetes takes a number, alone or with Ki, Mi, Gi, Ti, k, M, G or T, "
                "such as 96 or 1000Gi"
            )
        if "/" in name and not quantity.isdecimal():
            raise ValueError(f"{name} is {quantity!r}. Kubernetes takes whole numbers of a device")
    return value


Label = Annotated[str, AfterValidator(_label)]


class Kubernetes(Part):
    """A job on Kubernetes: one pod a node, in which torchrun starts the ranks."""

    kind: Literal["pytorchjob", "jobset"] = "pytorchjob"
    """Kubeflow's PyTorchJob, or a JobSet of Kubernetes' own special-interest group."""
    namespace: Label = ""
    """Empty: kubectl's current one."""
    image: Annotated[str, AfterValidator(_image)] = ""
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
    shared_memory: Annotated[str, AfterValidator(_memory)] = "64Gi"
    """Limit of /dev/shm, which NCCL and data loaders use."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have, such as node.kubernetes.io/instance-type: p4d.24xlarge."""
    resources: Annotated[dict[str, str], AfterValidator(_quantities)] = {}
    """What a pod asks for beside its GPUs, such as cpu: '96', memory: 1000Gi, rdma/hca: '8'."""
