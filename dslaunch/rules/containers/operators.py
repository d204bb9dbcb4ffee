"""What operators make of a job: the slots of an MPIJob, the hosts of launchers that start other pods."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import Launcher
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.manifest import Container, Workload, as_dict, workloads
from dslaunch.planfile import Plan
from dslaunch.rules.containers.manifests import of_containers
from dslaunch.rules.containers.quantities import amount
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_MPI = "kubeflow/mpi-operator:pkg/controller/mpi_job_controller.go 0.6; Open MPI 4.1, run"
_ENVIRONMENT = "kubeflow/training-operator:pkg/controller.v1/pytorch/envvar.go 1.8; torchrun 2.13, run"
_READ = re.compile(r"\$[{(]?(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)[})]?")
_NODES = ("--nnodes", "--num_machines")
_GPU = "nvidia.com/gpu"
_HOSTS = ("--hostfile", "-H", "--deepspeed_hostfile")
_OTHER, _THROUGH_SSH = "--deepspeed_multinode_launcher", ("openmpi", "mvapich", "mpich", "impi", "pdsh")
_SSH = re.compile(r"sshd|\$|entrypoint")
_NUMBER = ("-np", "-n", "--np", "-c")
_OTHER_HOSTS = ("--oversubscribe", "-oversubscribe", "--hostfile", "-hostfile", "--host", "-host", "-H")


@rule("kubernetes.slots", severity="error", raised_by="nobody", evidence=_MPI)
def slots(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An MPIJob whose mpirun starts more or fewer processes than there are slots, or with more slots than GPUs."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            each = _slots(workload)
            for container in _workers(workload) if each is not None else ():
                gpus = amount(container.resource("limits", _GPU))
                if gpus is not None and each is not None and each > gpus > 0:
                    has = int(gpus)
                    message = f"{each} processes on each worker, which has {has} GPUs: invalid device ordinal."
                    path = (*workload.path, "spec", "slotsPerWorker")
                    yield hit(file, path, message, f"Write slotsPerWorker: {has}.", raised_by="torch")
    for workload, _, inner in of_containers(files):
        each, workers = _slots(workload), _count(workload)
        for launch in inner.file.value.launches if each and workers else ():
            mpirun = launch.launcher("mpirun")
            number = mpirun.options.value(*_NUMBER) if mpirun else None
            if mpirun is None or number is None or not number.isdecimal() or not each or not workers:
                continue
            wanted, has, at = int(number), each * workers, mpirun.options.position(*_NUMBER)
            of = f"{wanted} processes, and {workers} worker{'s' if workers > 1 else ''} of {each} slots take {has}"
            fix = f"Write -np {has}, or change slotsPerWorker or the workers' replicas."
            if mpirun.options.has(*_OTHER_HOSTS):
                continue
            if wanted > has:
                yield from inner.at_home(Hit(inner.file.name, at, f"{of}: mpirun stops.", fix))
            elif wanted < has and any(amount(one.resource("limits", _GPU)) for one in _workers(workload)):
                message = f"{of}: {has - wanted} GPUs are not used."
                yield from inner.at_home(Hit(inner.file.name, at, message, fix, "slow"))


def _slots(workload: Workload) -> int | None:
    """slotsPerWorker of an MPIJob, which is 1 where it isn't given."""
    if workload.kind != "MPIJob":
        return None
    value = as_dict(workload.value.get("spec")).get("slotsPerWorker", 1)
    return value if type(value) is int else None


def _workers(workload: Workload) -> Iterator[Container]:
    return (one for pods in workload.pods if pods.role == "Worker" for one in pods.containers)


def _count(workload: Workload) -> int | None:
    counts = [pods.count for pods in workload.pods if pods.role == "Worker"]
    as_well = as_dict(workload.value.get("spec")).get("runLauncherAsWorker") is True
    return counts[0] + as_well if len(counts) == 1 and counts[0] is not None else None


@rule("kubernetes.mpi-worker", severity="error", raised_by="nobody", evidence=_MPI)
def worker(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An MPIJob's worker with a command of its own in the place of sshd: the launcher doesn't reach it."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            newest = workload.value.get("apiVersion") == "kubeflow.org/v2beta1"
            for container in [*_workers(workload)][:1] if workload.kind == "MPIJob" and newest else ():
                words = container.words
                if words and not any(_SSH.search(word) for _, word in words) and not words[0][1].endswith(".sh"):
                    program = words[0][1]
                    message = f"{program} takes the place of sshd here: the launcher doesn't reach this worker."
                    yield hit(file, words[0][0], message, "Leave command and args out, or start sshd -De in it.")


def _is_of_node(launcher: Launcher) -> bool:
    """Whether DeepSpeed's launcher is told which node it is on; accelerate's --machine_rank isn't read then."""
    return launcher.program == "deepspeed" and launcher.options.has("--node_rank")


@rule(
    "kubernetes.launcher-everywhere", severity="error", raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/launcher/runner.py main 0.19.8",
)  # fmt: skip
def everywhere(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """DeepSpeed's launcher with a hostfile as the command of each pod: each starts all the others."""
    kinds = ("Job", "JobSet", "PyTorchJob", "StatefulSet", "VolcanoJob")
    for workload, container, inner in of_containers(files):
        pods = next(each for each in workload.kinds if container in each.containers)
        alike = workload.kind == "PyTorchJob" and len(workload.pods) > len(workload.kinds)
        several = (pods.count or 0) > 1 or alike
        for launch in inner.file.value.launches if several and workload.kind in kinds else ():
            launcher = launch.launcher("deepspeed") or launch.launcher("accelerate")
            hosts = launcher.options.value(*_HOSTS) if launcher else None
            if launcher is None or launcher.options.has("--no_ssh") or _is_of_node(launcher):
                continue
            through_ssh = (launcher.options.value(_OTHER) or "pdsh") in _THROUGH_SSH
            if hosts and is_told(hosts) and through_ssh and not launch.conditional:
                message = (
                    f"each of {pods.count} pods starts all nodes of {hosts} through ssh, where no pod runs sshd: "
                    "the job is started many times, or not at all."
                )
                at = launcher.options.position(*_HOSTS)
                fix = "Use torchrun with --node-rank in each pod, or --no_ssh and --node_rank, or an MPIJob."
                yield from inner.at_home(Hit(inner.file.name, at, message, fix))


@rule("kubernetes.operator-variable", severity="error", raised_by="torchrun", evidence=_ENVIRONMENT)
def variables(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable that the operator of PyTorchJob doesn't set, or that counts processes, not nodes."""
    for workload, container, inner in of_containers(files):
        if workload.kind != "PyTorchJob" or container.value.get("envFrom"):
            continue
        own = {str(entry.get("name")) for _, entry in container.environment}
        own |= {each.name for each in inner.file.value.assignments}
        master = any(pods.role == "Master" for pods in workload.pods)
        number = str(as_dict(workload.value.get("spec")).get("nprocPerNode", "auto"))
        for launch in inner.file.value.launches:
            for flag in launch.launchers[-1].options.flags:
                found = _READ.fullmatch(flag.values[-1]) if flag.values else None
                if found is None or found[1] in own:
                    continue
                if not master:
                    message = f"without a Master the operator sets no {found[1]}: it is empty here."
                    fix = "Add a Master, or an elasticPolicy and leave the option to torchrun (PET_*)."
                    yield from inner.at_home(Hit(inner.file.name, flag.at, message, fix))
                elif found[1] == "WORLD_SIZE" and flag.name in _NODES and number.isdecimal() and int(number) > 1:
                    message = f"WORLD_SIZE counts processes here, {number} of each pod: more nodes than there are."
                    fix = "Write $PET_NNODES, or the number of pods."
                    yield from inner.at_home(Hit(inner.file.name, flag.at, message, fix, "hang", "nobody"))
