"""Kubernetes manifests that start a training: what the API refuses, pods that don't meet, GPUs, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.errors import nearest
from dslaunch.files.commands import Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import Container, Pods, Workload, as_dict, get, workloads
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.fields import whole
from dslaunch.rules.containers.manifests import containers_of, of_containers, shell_text
from dslaunch.rules.launchers.torchrun import most_nodes, option
from dslaunch.rules.registry import Hit, Severity, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.heredocs import Inner

_DOCUMENTATION = "the documentation of Kubernetes 1.33"
_GPU = "nvidia.com/gpu"
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|\{[A-Z_][A-Z0-9_]*\})")
_KUBERNETES = re.compile(r"(?<!\$)\$\(([A-Z_][A-Z0-9_]*)\)")
_OF_OPERATORS = (
    "MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_MAX_RESTARTS", "PET_NNODES",
    "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT", "PET_RDZV_ID",
    "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE",
)  # fmt: skip
_JOINS = re.compile(
    r"--nnodes[= ](?:[\d:]*[2-9]|[\d:]*\d\d|\S*\$)|--master[_-]addr|--rdzv[_-]endpoint|--machine_rank|--hostfile|"
    r"MASTER_ADDR"
)
"""What joins the processes of several pods."""
_FOR_FILE = re.compile(r"\b(?:test -[ef]|\[ -[ef]|cat|ls|stat) (/[\w./-]+)")
_NUMBER = re.compile(r"\$\{(?:HOSTNAME|POD_NAME|MY_POD_NAME)##?\*-\}")
"""The number at the end of a pod's name."""
_OF_NAME = "${HOSTNAME##*-}"
_INDEX = "JOB_COMPLETION_INDEX"


def _of(files: FileSet) -> Iterator[tuple[File, Workload]]:
    """The objects that start pods."""
    return ((file, each) for file in whole(files) for each in workloads(file.value))


def _is_template(workload: Workload) -> bool:
    """Whether envsubst or the like fills it in: there are variables where Kubernetes reads none."""
    values = [container.value for container in containers_of(workload)]
    return any("$" in str(value.get(key)) for value in values for key in ("image", "resources"))


@rule(
    "kubernetes.exec-variable", severity="error", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: command and args; torchrun 2.13, run",
)  # fmt: skip
def exec_variable(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """$NAME in a container's command that no shell reads: the program gets these letters."""
    for file, workload in _of(files):
        for container in containers_of(workload):
            direct = shell_text(container) is None and not _is_template(workload)
            direct = direct and not file.inside  # a heredoc's variables are the script's around it
            for path, word in container.words if direct else ():
                if found := _VARIABLE.search(word):
                    name = found[0].strip("${}")
                    message = f"no shell reads this command: {found[0]} reaches the program as it stands."
                    fix = f"Write $({name}), which Kubernetes fills in, or run it by sh -c."
                    yield hit(file, path, message, fix)
            yield from _unfilled(file, workload, container) if not _is_template(workload) else ()


def _unfilled(file: File, workload: Workload, container: Container) -> Iterator[Hit]:
    """$(NAME) of a variable that the container doesn't have, or has further below alone."""
    part = not container.value.get("image")  # a patch, whose base has the rest
    if part or container.value.get("envFrom") or workload.kind in ("VolcanoJob", "LeaderWorkerSet"):
        return
    names = [str(entry.get("name")) for _, entry in container.environment]
    known = {*names, *(_OF_OPERATORS if workload.kind in ("PyTorchJob", "MPIJob") else ())}
    known |= {_INDEX} if workload.kind in ("Job", "JobSet", "CronJob") else set()
    for path, word in container.words:
        for found in _KUBERNETES.finditer(word):
            name = found[1]
            if name not in known and "_SERVICE_" not in name and "_PORT" not in name:
                message = f"$({name}) is filled in from env, which has no {name}: it stays as it stands."
                yield hit(file, path, message, f"Add {name} to env, or write its value.{nearest(name, names)}")
    for index, (path, entry) in enumerate(container.environment):
        for found in _KUBERNETES.finditer(str(entry.get("value") or "")):
            if found[1] in names[index + 1 :] and found[1] not in names[:index]:
                message = f"$({found[1]}) stands above {found[1]}, which has no value yet: it stays as it stands."
                yield hit(file, (*path, "value"), message, f"Move {found[1]} above it.")


@rule(
    "kubernetes.pods", severity="hang", raised_by="nobody",
    evidence=f"{_DOCUMENTATION}: Jobs, Indexed completion mode; torchrun 2.13, run",
)  # fmt: skip
def pods(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Not as many pods as the launcher has nodes, pods that don't run at a time, or without a number."""
    said: set[tuple[str, Path]] = set()
    for file, workload in _of(files):
        found = [fault for each in workload.pods for fault in _of_job(file, workload, each)]
        said |= {(file.name, workload.path) for _ in found}
        yield from found
    for workload, container, inner in of_containers(files):
        if (inner.file.name, workload.path) in said:
            continue
        apart = workload.kind in ("Deployment", "MPIJob", "Pod") or _one_of_several(inner.outer, workload)
        for launch in inner.file.value.launches if not apart else ():
            launcher = launch.launcher("torchrun")
            nodes, count = most_nodes(launcher) if launcher else None, workload.count
            if launcher is not None and nodes is not None and nodes == count:
                yield from _counted_anew(workload, container, inner, launcher, nodes)
            if launcher is None or nodes is None or not count or nodes == count:
                continue
            if nodes == 1 and not _launches_together(workload):
                continue  # each for itself: folds, seeds
            elastic = "elasticPolicy" in (workload.value.get("spec") or {})
            if workload.kind == "PyTorchJob" and (elastic or not launcher.options.has("--nnodes")):
                continue  # PET_NNODES
            message = f"torchrun is for {nodes} node{'s' if nodes > 1 else ''}, and {_pods(count)}"
            message += ": it waits for more." if nodes > count else ": they don't train together."
            at = launcher.options.position("--nnodes") if launcher.options.has("--nnodes") else launcher.at
            fix = f"Write --nnodes={count}, or start {nodes}."
            severity: Severity | None = None if nodes > count else "wrong"
            yield from inner.at_home(Hit(inner.file.name, at, message, fix, severity))


def _launches_together(workload: Workload) -> bool:
    return any(_launches(pods) for pods in workload.kinds)


def _counted_anew(
    workload: Workload, container: Container, inner: Inner, launcher: Launcher, nodes: int
) -> Iterator[Hit]:
    """A rank that several pods share: a number, or the index within one Job of a JobSet's that train together."""
    pods = next(each for each in workload.kinds if container in each.containers)
    static = (option(launcher, "rdzv-backend") or "static") == "static"
    fixed = option(launcher, "node-rank")
    if fixed and fixed.isdecimal() and static and nodes > 1 and (pods.count or 0) > 1:
        message = f"each of {pods.count} pods alike is node {fixed}: the others are waited for in vain."
        at = launcher.options.position("--node-rank", "--node_rank")
        fix = f"Write the pod's own number, such as $(JOB_COMPLETION_INDEX) or {_OF_NAME}."
        yield from inner.at_home(Hit(inner.file.name, at, message, fix))
    each_job = pods.maker.get("completions", pods.maker.get("parallelism", 1))
    rank = launcher.options.value("--node-rank", "--node_rank") or ""
    if workload.kind == "JobSet" and re.fullmatch(rf"\$[{{(]?{_INDEX}[}})]?", rank) and each_job != nodes:
        jobs = nodes // each_job
        message = f"{_INDEX} counts within each Job, and {jobs} Jobs train together: they have the same ranks."
        fix = "Add the label jobset.sigs.k8s.io/job-index times the pods of a Job, or take one Job of all pods."
        at = launcher.options.position("--node-rank", "--node_rank")
        yield from inner.at_home(Hit(inner.file.name, at, message, fix))


def _one_of_several(file: File, workload: Workload) -> bool:
    """Whether others of one pod stand beside one of one pod: a Job for each rank."""
    alike = [each for each in workloads(file.value) if each.kind == workload.kind and each.count == 1]
    return workload.count == 1 and len(alike) > 1


def _pods(count: int) -> str:
    return "there is one pod" if count == 1 else f"there are {count} pods"


def _of_job(file: File, workload: Workload, each: Pods) -> Iterator[Hit]:
    """What a Job or a StatefulSet says of its pods."""
    if workload.kind == "StatefulSet" and (each.count or 0) > 1 and _launches(each):
        parallel = each.maker.get("podManagementPolicy") == "Parallel"
        for container in each.containers:
            probe = next((name for name in ("readinessProbe", "startupProbe") if _asks(container, name)), None)
            if probe is not None and not parallel:
                message = f"pod 1 is made once pod 0 is ready ({probe}), and pod 0 waits for {each.count} of them."
                fix = "Write podManagementPolicy: Parallel, or leave the probe out."
                yield hit(file, (*container.path, probe), message, fix)
    if workload.kind in ("Deployment", "ReplicaSet", "DaemonSet") or (
        workload.kind == "Job" and each.maker.get("completionMode") != "Indexed"
    ):
        for path, word in ((path, word) for container in each.containers for path, word in container.words):
            if (found := _NUMBER.search(word)) and _launches(each):
                message = f"the pods of a {workload.kind} end in letters by chance: {found[0]} is no number."
                fix = "Make it a StatefulSet with podManagementPolicy: Parallel, or an Indexed Job."
                yield hit(file, path, message, fix, severity="error", raised_by="torchrun")
    if workload.kind not in ("Job", "JobSet"):
        return
    completions, parallelism = each.maker.get("completions"), each.maker.get("parallelism", 1)
    mode = each.maker.get("completionMode", "Indexed" if workload.kind == "JobSet" else None)  # its webhook's
    indexed = mode == "Indexed"
    whole = isinstance(completions, int) and isinstance(parallelism, int)
    if whole and parallelism < completions and _launches(each):
        message = f"{completions} pods are wanted and {parallelism} run at a time: those wait for the others."
        path = (*each.above, "parallelism" if "parallelism" in each.maker else "completions")
        yield hit(file, path, message, f"Write parallelism: {completions}.")
    reads = [path for container in each.containers for path, word in container.words if _INDEX in word]
    if reads and not indexed:
        message = f"{_INDEX} is set in an Indexed Job alone: here it is empty."
        yield hit(file, reads[0], message, "Add completionMode: Indexed.", severity="error")


def _asks(container: Container, probe: str) -> bool:
    """Whether a probe asks the program itself, which has to answer, or for a file that the program makes."""
    asked = as_dict(container.value.get(probe))
    words = get(asked, "exec", "command")
    text = " ".join(str(word) for word in words) if isinstance(words, list) else ""
    found = _FOR_FILE.search(text)
    made = found is not None and not any(found[1] in word for _, word in container.words)
    return made or any(key in asked for key in ("httpGet", "grpc"))


def _launches(each: Pods) -> bool:
    """Whether the pods are the nodes of one training: they run a launcher, or name a meeting point."""
    words = " ".join(word for container in each.containers for _, word in container.words)
    names = {str(entry.get("name")) for container in each.containers for _, entry in container.environment}
    return "MASTER_ADDR" in names or _JOINS.search(words) is not None
