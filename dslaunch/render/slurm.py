"""What sbatch and srun are told: the options of job.sbatch.

A task is a rank, or a node where launcher.runner names another runner. GPUs are asked for with --gres=gpu:N, which
every GPU cluster's select plugin takes; every task of a node sees all of its GPUs, and LOCAL_RANK picks one. srun
gets --cpus-per-task again, for since SLURM 22.05 it does not inherit it from sbatch, and --mpi=none, since ranks
find one another over MASTER_ADDR.

Hosts of several kinds (cluster.mixed) are the components of a heterogeneous job, one srun over all of them: its
tasks are numbered through, and SLURM_NTASKS counts them all (SLURM 22.05, run; SchedMD/slurm:doc/html/
heterogeneous_jobs.shtml). SLURM hands some options of a component on to the next; what is asked for is repeated.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from dslaunch.errors import ConfigError, listed
from dslaunch.hosts import expanded
from dslaunch.planfile import Plan
from dslaunch.render.program import RUN_DIR
from dslaunch.schema.cluster import Slots
from dslaunch.schema.config import RunConfig
from dslaunch.schema.launch import Container

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]&|*()-]*")
_SETTINGS = (
    "partition", "account", "time", "qos", "constraint", "exclude", "reservation", "switches", "segment",
    "comment", "mem",
)  # fmt: skip
_APPTAINER_GPUS = {"cuda": ["--nv"], "rocm": ["--rocm"], "cpu": []}
WORK_DIR = '"$DSLAUNCH_WORK_DIR"'


@dataclass(frozen=True)
class SlurmComponent:
    """A component of a heterogeneous job."""

    nodes: int
    directives: tuple[str, ...]
    """Options of sbatch, each ready to stand after `#SBATCH `."""
    srun: tuple[str, ...]
    """Options of srun, each a shell word."""


@dataclass(frozen=True)
class SlurmContext:
    """The part of the context that job.sbatch places."""

    directives: tuple[str, ...]
    """Options of sbatch, each ready to stand after `#SBATCH `."""
    srun: tuple[str, ...]
    """Options of srun, each a shell word."""
    wrapper: tuple[str, ...]
    """Words before `task`: the container's command, where srun has no option for it."""
    task: tuple[str, ...]
    """What each task runs, as shell words: rank.sh, or launch.sh where another runner starts a node's ranks."""
    work_dir: str
    """Folder in the container to work in, as a shell word; empty where it is the folder of the submission."""
    modules: tuple[str, ...]
    setup: tuple[str, ...]
    """Shell lines as the user wrote them."""
    container: bool
    requeue: int
    """Times that the job may be put back into the queue."""
    spare_nodes: int
    """Nodes that wait to take the place of one that fails."""
    ordered: str
    """Whose leaf switches decide the order of the nodes: cluster (`leaves`) | slurm; empty: none do."""
    leaves: str
    """A line a leaf switch of cluster.switches, which names its hosts."""
    tasks_per_node: int
    blocker: str
    """Why the job cannot start, in a sentence; empty where it can."""
    components: tuple[SlurmComponent, ...] = ()
    """Of a heterogeneous job, in rank order; the first has `directives` and `srun`. Empty for any other job."""


def slurm_context(plan: Plan, config: RunConfig) -> SlurmContext:
    """Raises ConfigError for an option that would break its line."""
    slurm, container = config.launcher.slurm, config.launcher.container
    if container.kind != "none" and not container.image:
        raise ConfigError(
            f"launcher.container.image is empty, but launcher.container.kind is {container.kind}. "
            "Name an image, or set kind=none"
        )
    for line in slurm.setup:
        _one_line("launcher.slurm.setup", line)
    _check_segment(plan, config)
    first, *others = _components(plan, config)
    first = replace(first, directives=(*first.directives, *slurm.sbatch_extra))
    return SlurmContext(
        directives=first.directives,
        srun=first.srun,
        wrapper=_apptainer(container, plan.cluster.accelerator),
        task=("bash", f'"$DSLAUNCH_RUN_DIR/{"launch" if _by_node(plan) else "rank"}.sh"', "slurm"),
        work_dir=shlex.quote(container.workdir) if container.kind != "none" and container.workdir else "",
        modules=tuple(_one_line("launcher.slurm.modules", name) for name in slurm.modules),
        setup=slurm.setup,
        container=container.kind != "none",
        requeue=slurm.requeue,
        spare_nodes=slurm.spare_nodes,
        ordered=_ordered(config),
        leaves=_leaves(config),
        blocker=component_blocker(plan),
        tasks_per_node=1 if _by_node(plan) else plan.cluster.gpus_per_node,
        components=(first, *others) if others else (),
    )


def component_blocker(plan: Plan) -> str:
    """What a heterogeneous job cannot do, in a sentence; empty where it can start, or is none."""
    if not plan.cluster.kinds or not plan.cluster.switches:
        return ""
    return (
        "cluster.switches orders the ranks, and a heterogeneous job (cluster.mixed) has those of one kind of host "
        "after another. Take cluster.switches out, or use launcher=ssh"
    )


def _components(plan: Plan, config: RunConfig) -> list[SlurmComponent]:
    """One for each kind of host, in rank order."""
    slurm, cluster = config.launcher.slurm, plan.cluster
    kinds = config.cluster.kinds or (Slots(nodes=cluster.nodes, gpus=cluster.gpus_per_node),)
    found = []
    for at, kind in enumerate(kinds):
        component = [f"--het-group={at}"] if len(kinds) > 1 else []
        # Of the leading component alone, which has the batch script; a requeue is for all of them.
        leading = ("--job-name", "--output", "--open-mode")
        directives = [line for line in _directives(plan, config, kind) if not (at and line.startswith(leading))]
        srun = (*component, *_srun(plan, config, kind), *_pyxis(config.launcher.container))
        found.append(SlurmComponent(kind.nodes + slurm.spare_nodes, tuple(directives), srun))
    return found


def _ordered(config: RunConfig) -> str:
    order, switches = config.launcher.slurm.rank_order, config.cluster.switches
    if order == "slurm" or (order == "auto" and not switches) or config.cluster.node_count == 1:
        return ""
    return "cluster" if switches else "slurm"


def _leaves(config: RunConfig) -> str:
    leaves = config.cluster.switches.values()
    return "\n".join(" ".join(host for each in patterns for host in expanded(each)) for patterns in leaves)


def _check_segment(plan: Plan, config: RunConfig) -> None:
    """Raises ConfigError where a segment does not fit the job, an NVLink domain, or a tensor-parallel group.

    SLURM itself wants a number that divides the job's nodes and is no larger than a block (SchedMD/slurm:
    src/plugins/topology/block/eval_nodes_block.c, 24.05).
    """
    segment, nodes, node = config.launcher.slurm.segment, plan.cluster.nodes, config.cluster.node
    if not segment:
        return
    nodes += config.launcher.slurm.spare_nodes
    domain = max(1, node.nvlink_domain // node.gpus)
    spans = {name: -(-each.tp // plan.cluster.gpus_per_node) for name, each in plan.components.items()}
    wide = next((name for name, span in spans.items() if segment % span), "")
    sizes = [size for size in range(1, domain + 1) if nodes % size == 0]
    legal = [size for size in sizes if not any(size % span for span in spans.values())]
    if nodes % segment or segment > domain or wide:
        why = (
            f"{nodes} nodes are no multiple of it" if nodes % segment
            else f"an NVLink domain has {domain} nodes of {node.gpus} GPUs" if segment > domain
            else f"tp {plan.components[wide].tp} of {wide} takes {spans[wide]} nodes"
        )  # fmt: skip
        raise ConfigError(
            f"launcher.slurm.segment is {segment}, but {why}. Allowed here: {listed(legal) or 'none: take it out'}"
        )


def _by_node(plan: Plan) -> bool:
    """Whether a task is a node, whose ranks torchrun or DeepSpeed's launcher starts, and not a rank."""
    return plan.launcher.runner in ("torchrun", "deepspeed")


def _shape(plan: Plan, config: RunConfig, kind: Slots) -> list[str]:
    """Options of srun: nodes, tasks, tasks of a node, cores of a task."""
    cores = _cpus(plan, config)
    tasks, cores = (1, kind.gpus * cores) if _by_node(plan) else (kind.gpus, cores)
    return [
        f"--nodes={kind.nodes}", f"--ntasks={kind.nodes * tasks}", f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cores}",
    ]  # fmt: skip


def _cpus(plan: Plan, config: RunConfig) -> int:
    """CPU cores per rank; raises ConfigError where those of a node's ranks are more than it has.

    Of hosts with unequal numbers of GPUs `node` is the part of one.
    """
    cores, ranks = config.cluster.node.cpu_cores, plan.cluster.gpus_per_node
    given = config.launcher.slurm.cpus_per_task
    if given and given * ranks > cores:
        raise ConfigError(
            f"launcher.slurm.cpus_per_task is {given}: {given} x {ranks} ranks = {given * ranks} cores, and a "
            f"node has {cores}. Give at most {cores // ranks}, or cluster.node.cpu_cores where yours have more"
        )
    return given or max(1, cores // ranks)


def _directives(plan: Plan, config: RunConfig, kind: Slots) -> list[str]:
    """Of one kind of host, by what they are about: the job, its shape, its queue. Empty ones are the site's."""
    slurm, cluster = config.launcher.slurm, plan.cluster
    found = [
        f"--job-name={plan.name}",
        "--output=slurm-%j.out",
        f"--nodes={kind.nodes + slurm.spare_nodes}",
        f"--ntasks-per-node={kind.gpus}",
        f"--cpus-per-task={_cpus(plan, config)}",
        # A job that SLURM starts again writes on in its log; without a number of times it is not started again.
        "--open-mode=append",
        "--requeue" if slurm.requeue else "--no-requeue",
    ]
    if cluster.accelerator != "cpu":
        found.append(f"--gres=gpu:{kind.gpus}")
    if slurm.exclusive:
        found.append("--exclusive")
    if slurm.spare_nodes or config.restart.elastic:
        found.append("--no-kill")  # the job outlives a node that fails
    own = {"partition": kind.partition, "constraint": kind.constraint}
    values = {name: own.get(name) or getattr(slurm, name) for name in _SETTINGS}
    found += [f"--{name}={_directive_value(name, str(value))}" for name, value in values.items() if value]
    if slurm.time and slurm.signal_before_s:
        found.append(f"--signal=TERM@{slurm.signal_before_s}")
    return found


def _directive_value(name: str, value: str) -> str:
    """As sbatch reads it: words with a blank or a special character in double quotes."""
    key = f"launcher.slurm.{name}"
    _one_line(key, value)
    if _PLAIN.fullmatch(value):
        return value
    if '"' in value or "\\" in value:
        raise ConfigError(
            f"{key} is {value!r}: a quote or backslash does not survive on a #SBATCH line. Take it out"
        )
    return f'"{value}"'


def _one_line(key: str, text: str) -> str:
    if not text.strip() or "\n" in text or "\r" in text:
        raise ConfigError(f"{key}: {text!r} is not one line of text. Give each line as an item of its own")
    return text


def _srun(plan: Plan, config: RunConfig, kind: Slots) -> list[str]:
    return [
        *_shape(plan, config, kind),
        *(["--distribution=arbitrary"] if _ordered(config) else []),
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--export=ALL",
    ]


def _pyxis(container: Container) -> list[str]:
    """Options of NVIDIA's pyxis plugin; the run folder and the folder of the submission are mounted."""
    if container.kind != "pyxis":
        return []
    own = f"{RUN_DIR}:{RUN_DIR}" + ("" if container.workdir else f",{WORK_DIR}:{WORK_DIR}")
    mounts = "".join("," + shlex.quote(_mount(mount)) for mount in container.mounts)
    workdir = [f"--container-workdir={shlex.quote(container.workdir)}"] if container.workdir else []
    image = f"--container-image={shlex.quote(container.image)}"
    return [image, f"--container-mounts={own}{mounts}", *workdir]


def _apptainer(container: Container, accelerator: str) -> tuple[str, ...]:
    if container.kind != "apptainer":
        return ()
    binds = [f"{RUN_DIR}:{RUN_DIR}", *([] if container.workdir else [f"{WORK_DIR}:{WORK_DIR}"])]
    binds += [shlex.quote(_mount(mount)) for mount in container.mounts]
    gpus = _APPTAINER_GPUS[accelerator]
    workdir = ["--pwd", shlex.quote(container.workdir)] if container.workdir else []
    options = [word for bind in binds for word in ("--bind", bind)]
    return ("apptainer", "exec", *gpus, *options, *workdir, shlex.quote(container.image))


def _mount(mount: str) -> str:
    if ":" not in mount or "," in mount:
        raise ConfigError(
            f"launcher.container.mounts: {mount!r} is not one HOST:CONTAINER pair. Write such as /data:/data"
        )
    return _one_line("launcher.container.mounts", mount)
