"""What sbatch and srun are told: the options of job.sbatch.

A task is a rank, or a node where launcher.runner names another runner. GPUs are asked for with --gres=gpu:N, which
every GPU cluster's select plugin takes; every task of a node sees all of its GPUs, and LOCAL_RANK picks one. srun
gets --cpus-per-task again, for since SLURM 22.05 it does not inherit it from sbatch, and --mpi=none, since ranks
find one another over MASTER_ADDR.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from dslaunch.errors import ConfigError, listed
from dslaunch.hosts import expanded
from dslaunch.planfile import Plan
from dslaunch.render.program import RUN_DIR
from dslaunch.schema.config import RunConfig
from dslaunch.schema.launch import Container

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]&|*()-]*")
_SETTINGS = (
    "partition", "account", "time", "qos", "constraint", "exclude", "reservation", "switches", "segment",
    "comment", "mem",
)  # fmt: skip
_APPTAINER_GPUS = {"cuda": ["--nv"], "rocm": ["--rocm"], "cpu": []}
_UNEQUAL = (
    "hosts with unequal numbers of GPUs (cluster.mixed) are launched over ssh: SLURM gives each node of a job "
    "as many"
)
WORK_DIR = '"$DSLAUNCH_WORK_DIR"'


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
    return SlurmContext(
        directives=(*_directives(plan, config), *slurm.sbatch_extra),
        srun=(*_srun(plan, config), *_pyxis(container)),
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
        blocker=_UNEQUAL if plan.cluster.slots else "",
        tasks_per_node=1 if _by_node(plan) else plan.cluster.gpus_per_node,
    )


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


def _shape(plan: Plan, config: RunConfig) -> list[str]:
    """Options of sbatch and srun alike: nodes, tasks of a node, cores of a task."""
    ranks, cores = plan.cluster.gpus_per_node, _cpus(plan, config)
    tasks, cores = (1, ranks * cores) if _by_node(plan) else (ranks, cores)
    return [f"--nodes={plan.cluster.nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}"]


def _cpus(plan: Plan, config: RunConfig) -> int:
    """CPU cores per rank; raises ConfigError where those of a node's ranks are more than it has."""
    cores, ranks = config.cluster.node.cpu_cores, plan.cluster.gpus_per_node
    given = config.launcher.slurm.cpus_per_task
    if given and given * ranks > cores:
        raise ConfigError(
            f"launcher.slurm.cpus_per_task is {given}: {given} x {ranks} ranks = {given * ranks} cores, and a "
            f"node has {cores}. Give at most {cores // ranks}, or cluster.node.cpu_cores where yours have more"
        )
    return given or max(1, cores // ranks)


def _directives(plan: Plan, config: RunConfig) -> list[str]:
    """Sorted by what they are about: the job, its shape, its queue. Empty settings are left to the site."""
    slurm, cluster = config.launcher.slurm, plan.cluster
    found = [
        f"--job-name={plan.name}",
        "--output=slurm-%j.out",
        f"--nodes={cluster.nodes + slurm.spare_nodes}",
        f"--ntasks-per-node={cluster.gpus_per_node}",
        f"--cpus-per-task={_cpus(plan, config)}",
        # A job that SLURM starts again writes on in its log; without a number of times it is not started again.
        "--open-mode=append",
        "--requeue" if slurm.requeue else "--no-requeue",
    ]
    if cluster.accelerator != "cpu":
        found.append(f"--gres=gpu:{cluster.gpus_per_node}")
    if slurm.exclusive:
        found.append("--exclusive")
    if slurm.spare_nodes or config.restart.elastic:
        found.append("--no-kill")  # the job outlives a node that fails
    values = {name: getattr(slurm, name) for name in _SETTINGS}
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


def _srun(plan: Plan, config: RunConfig) -> list[str]:
    nodes, per_node, cores = _shape(plan, config)
    tasks = plan.cluster.nodes if _by_node(plan) else plan.world_size
    return [
        *(nodes, f"--ntasks={tasks}", per_node, cores),
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
