"""What Kubernetes says of a run's job, what its pods said, and how they are ended: by kubectl.

A PyTorchJob's pods carry training.kubeflow.org/job-name, replica-type and replica-index
(kubeflow/training-operator v1.9.0), a JobSet's jobset.sigs.k8s.io/jobset-name and
batch.kubernetes.io/job-completion-index (kubernetes-sigs/jobset v0.9.1).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.render.kubernetes import FILE

_LIMIT_S = 120.0
_MISSING = re.compile(r"\(NotFound\)|not found", re.IGNORECASE)
_RESOURCES = {
    "PyTorchJob": ("pytorchjobs.kubeflow.org", "training.kubeflow.org/job-name"),
    "JobSet": ("jobsets.jobset.x-k8s.io", "jobset.sigs.k8s.io/jobset-name"),
}
"""By kind: how kubectl names it, and the label that its pods have its name in."""
_ENDS: dict[str, Literal["finished", "failed"]] = {
    "Succeeded": "finished", "Completed": "finished", "Failed": "failed",
}  # fmt: skip
"""What a condition of either kind says of the end."""
_INDEX = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")
_TYPE = "training.kubeflow.org/replica-type"

Standing = Literal["queued", "running", "finished", "failed", "lost", "unknown"]


@dataclass(frozen=True)
class Job:
    """The job that a run's manifest describes."""

    kind: str
    name: str
    namespace: str
    """Empty: kubectl's current one."""
    keeps: bool
    """Its run folder stands on a volume that outlives the pods."""

    @property
    def place(self) -> tuple[str, ...]:
        """Option of kubectl."""
        return (f"--namespace={self.namespace}",) if self.namespace else ()

    @property
    def resource(self) -> str:
        return f"{_RESOURCES[self.kind][0]}/{self.name}"

    @property
    def selector(self) -> str:
        """Of its pods."""
        return f"{_RESOURCES[self.kind][1]}={self.name}"


@dataclass(frozen=True)
class Pod:
    """One node's pod."""

    name: str
    node: int
    phase: str
    exit_status: int | None
    ended_at: str
    """RFC 3339; empty while it runs."""


def job_of(folder: Path) -> Job:
    """The job of a run folder; raises ConfigError where it holds no manifest."""
    path = folder / FILE
    try:
        _, job = [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. It is what the run was launched with") from error
    metadata = job["metadata"]
    keeps = "persistentVolumeClaim" in path.read_text(encoding="utf-8")
    return Job(job["kind"], metadata["name"], metadata.get("namespace", ""), keeps)


def standing(job: Job) -> tuple[Standing, str]:
    """How the job stands, and why in words."""
    done = _kubectl("get", job.resource, *job.place, "--output=json")
    if done.returncode:
        if _MISSING.search(done.stderr):
            return "lost", f"Kubernetes has no {job.resource}: it was deleted"
        return "unknown", f"kubectl: {done.stderr.strip()}"
    for each in json.loads(done.stdout).get("status", {}).get("conditions", []):
        if each.get("status") == "True" and each.get("type") in _ENDS:
            why = str(each.get("message", ""))
            return _ENDS[each["type"]], why if each["type"] == "Failed" else ""
    phases = Counter(pod.phase for pod in pods(job))
    said = ", ".join(f"{number} {phase}" for phase, number in sorted(phases.items()))
    return ("running" if phases["Running"] else "queued"), f"pods: {said or 'none yet'}"


def pods(job: Job) -> list[Pod]:
    """Those that there are, by node."""
    done = _kubectl("get", "pods", *job.place, f"--selector={job.selector}", "--output=json")
    if done.returncode:
        raise LaunchError(f"kubectl get pods: {done.stderr.strip()}. Look at `kubectl config current-context`")
    return sorted(map(_pod, json.loads(done.stdout)["items"]), key=lambda pod: pod.node)


def logs_command(
    job: Job, rank: int | None, per_node: int, lines: int, *, first_error: bool, follow: bool
) -> list[str]:
    """The kubectl that shows what was asked for: all pods, the pod of a rank's node, or the one that failed first.

    Raises:
        ConfigError: there is no such pod, or none failed.
    """
    options = [*job.place, f"--tail={lines or -1}", *(["--follow"] if follow else [])]
    if rank is None and not first_error:
        found = pods(job)
        return ["kubectl", "logs", f"--selector={job.selector}", "--prefix",
                f"--max-log-requests={max(5, len(found))}", *options]  # fmt: skip
    pod = _first_failed(job) if first_error else _of_rank(job, rank or 0, per_node)
    return ["kubectl", "logs", pod.name, *options]


def delete(folder: Path, job: Job) -> None:
    """End the job, its pods and its ConfigMap, and wait until they are gone.

    Raises:
        LaunchError: kubectl fails.
    """
    done = _kubectl("delete", f"--filename={folder / FILE}", "--ignore-not-found", "--wait", *job.place)
    if done.returncode:
        look = f"kubectl get {job.resource}"
        raise LaunchError(f"kubectl delete: {done.stderr.strip()}. The job may still run: {look}")


def keep_logs(job: Job, logs: Path) -> None:
    """What the pods said so far, in the run folder: it goes with them."""
    every = (f"--selector={job.selector}", "--prefix", "--tail=-1", "--max-log-requests=1000")
    done = _kubectl("logs", *every, *job.place)
    if done.returncode == 0:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "launcher.log").write_text(done.stdout, encoding="utf-8")


def _first_failed(job: Job) -> Pod:
    failed = [pod for pod in pods(job) if pod.exit_status]
    if not failed:
        raise ConfigError(f"{job.resource}: no pod of it has failed. What they say: dslaunch logs RUN")
    return min(failed, key=lambda pod: pod.ended_at)


def _of_rank(job: Job, rank: int, per_node: int) -> Pod:
    found = {pod.node: pod for pod in pods(job)}
    if rank // per_node not in found:
        nodes = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"rank {rank}: node {rank // per_node} has no pod; nodes with one: {nodes}.")
    return found[rank // per_node]


def _pod(item: dict[str, Any]) -> Pod:
    status, metadata = item.get("status", {}), item["metadata"]
    ended = [each.get("state", {}).get("terminated") for each in status.get("containerStatuses", [])]
    last: dict[str, Any] = next((each for each in ended if each), {})
    said = (last.get("exitCode"), str(last.get("finishedAt", "")))
    return Pod(metadata["name"], _node(metadata), status.get("phase", "Unknown"), *said)


def _node(metadata: dict[str, Any]) -> int:
    """The master is node 0, and worker I node I + 1; a JobSet counts its pods."""
    labels = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    index = int(next((labels[name] for name in _INDEX if name in labels), "0"))
    return index + 1 if str(labels.get(_TYPE, "")).lower() == "worker" else index


def _kubectl(*words: str) -> subprocess.CompletedProcess[str]:
    """kubectl's answer; one that cannot be had is a failed one."""
    argv: Sequence[str] = ("kubectl", *words)
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, returncode=1, stdout="", stderr=str(error))
