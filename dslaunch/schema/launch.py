"""Where and how it runs: engine, launcher, program, files."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dslaunch.schema.base import NonNegative, Part, Positive, PositiveFloat, Texts
from dslaunch.schema.deepspeed import ActivationCheckpointing, Monitor
from dslaunch.schema.kubernetes import Kubernetes
from dslaunch.schema.slurm import Memory, Nodes, Options, Switches, TimeLimit, Word

_WEEK_MINUTES = 7 * 24 * 60


EngineName = Literal["deepspeed", "torch", "native", "megatron", "megatron_deepspeed", "megatron_mimo"]


class Goal(Part):
    """What a plan has to reach."""

    name: Literal["throughput", "fewest_gpus", "lowest_memory", "deadline", "cost"] = "throughput"
    """What strategy=auto looks for: the shortest step; the smallest cluster that fits, or that meets a deadline;
    the least GPU memory; the lowest price of a step."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the GPU's memory that a plan may use."""
    engines: Annotated[tuple[EngineName, ...], Field(strict=False)] = ()
    """Engines that a plan may use where engine is auto; empty: all."""
    tokens: PositiveFloat | None = None
    """Tokens of the whole training, for deadline and cost."""
    days: PositiveFloat | None = None
    """Days in which they are to be trained on."""

    @model_validator(mode="after")
    def _says_when(self) -> Goal:
        missing = [key for key in ("tokens", "days") if getattr(self, key) is None]
        if self.name == "deadline" and missing:
            raise ValueError(f"goal is deadline, and {missing[0]} is missing: give goal.tokens and goal.days")
        if len(missing) == 1:
            raise ValueError(f"{missing[0]} is missing: goal.tokens and goal.days go together")
        if not missing and self.name not in ("deadline", "cost"):
            raise ValueError(f"tokens and days are read by goal=deadline and goal=cost; goal is {self.name}")
        return self


class Engine(Part):
    """Who executes the plan."""

    name: Literal[
        "auto", "deepspeed", "torch", "native", "megatron", "megatron_deepspeed", "megatron_mimo"
    ] = "auto"
    """auto: the first engine that can execute the layout."""
    version: str = ""
    """Version of the framework that the files are for, or its series (0.18: the newest of it); the engine's
    default where it is empty."""
    path: str = ""
    """A checkout of Megatron-LM or Megatron-DeepSpeed, for the engines that run its pretrain script."""
    huggingface: bool = False
    """Hugging Face's Trainer reads the DeepSpeed JSON: what it fills in stands there as `auto`, and the arguments
    it needs for that in hf_args.json (engine deepspeed)."""
    accelerate: bool = False
    """The script makes accelerate's Accelerator, or is a Hugging Face Trainer: each rank gets what `accelerate
    launch` would set from accelerate.yaml (engine torch)."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    monitor: Monitor = Monitor()
    extra: dict[str, Any] = {}
    """What the framework takes and dslaunch does not model, checked against the framework's own keys."""


class Slurm(Part):
    """What sbatch is told. Empty is left to the site's defaults."""

    partition: Word = ""
    """Of sbatch --partition; SLURM's default where it is empty."""
    account: Word = ""
    """Of sbatch --account."""
    time: TimeLimit = ""
    """Time limit, such as 12:00:00 or 2-00:00:00 (quote it in YAML)."""
    qos: Word = ""
    """Of sbatch --qos."""
    constraint: Word = ""
    """Features that nodes must have: sbatch --constraint."""
    exclude: Nodes = ""
    """Nodes to leave out, such as n[1-2]."""
    reservation: Word = ""
    """Of sbatch --reservation."""
    switches: Switches = ""
    """Leaf switches wanted, optionally @ the time to wait for them: 1@00:30:00."""
    segment: NonNegative = 0
    """Nodes that have to stand in one block of topology/block each, such as an NVLink domain's (SLURM 24.05 or
    later, sbatch --segment); divides the job's nodes. 0: SLURM's own."""
    rank_order: Literal["auto", "slurm", "switches"] = "auto"
    """Order of the nodes, and so of the ranks. slurm: as SLURM lists them; switches: those of one leaf switch
    after one another, by cluster.switches or, where there is none, by SLURM's own topology; auto: by
    cluster.switches where it is given."""
    comment: str = ""
    """Of sbatch --comment."""
    mem: Memory = ""
    """Memory per node; empty takes the site's default, 0 all of it."""
    exclusive: bool = True
    """Whole nodes."""
    cpus_per_task: Positive | None = None
    """CPU cores per rank; the node's cores shared out where it is not given."""
    signal_before_s: NonNegative = 0
    """Seconds before the time limit at which every rank gets SIGTERM, for programs that then save; 0 is never."""
    requeue: NonNegative = 0
    """Times that the job is put back into the queue, in the same run folder, to go on from its newest checkpoint:
    after a failure, a preemption, a lost node, or the signal before the time limit. 0: it is not."""
    spare_nodes: NonNegative = 0
    """Nodes that the job gets beside the plan's; they wait to take the place, and the ranks, of one that fails."""
    continuations: NonNegative = 0
    """Jobs queued behind the first at once, each of which starts where the one before it failed or ran out of
    time, and goes on from the newest checkpoint."""
    at_once: NonNegative = 0
    """Runs of a sweep (--multirun) that may run at the same time; 0: as many as SLURM starts."""
    modules: Texts = ()
    """Environment modules to load, in order."""
    setup: Texts = ()
    """Shell lines run on each node's batch step before training."""
    sbatch_extra: Options = ()
    """Further #SBATCH options, each as one line without `#SBATCH`, such as --mail-type=END."""


class Stage(Part):
    """A copy of the code on every node's own disk, in which the ranks work (launchers ssh and slurm)."""

    source: str = Field(default="", alias="from")
    """The folder that is copied; it holds the one that is launched from, and the script."""
    to: str = ""
    """A folder on a disk of each node's own, such as /local/scratch; the copy gets a folder named after the run in
    it, which is removed at the end."""
    exclude: Texts = (
        ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", "runs", "wandb", ".env", ".env.*",
        ".netrc", ".ssh", ".aws", "*.pem", "*.key", "id_rsa*", "id_ed25519*",
    )  # fmt: skip
    """Patterns of names, or of paths from that folder, that are left out."""

    @model_validator(mode="after")
    def _whole(self) -> Stage:
        if bool(self.source) != bool(self.to):
            missing = "to" if self.source else "from"
            raise ValueError(f"{missing} is missing: give from, the folder to copy, and to, its place on a node")
        if self.to and not self.to.startswith("/"):
            raise ValueError(f"to is {self.to!r}. Give an absolute path, such as /local/scratch")
        return self


class Container(Part):
    """The container that each rank runs in."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """Who starts the container on each node, under SLURM; the other launchers start no container."""
    image: str = ""
    """Image or path, as the container tool takes it."""
    mounts: Texts = ()
    """HOST:CONTAINER pairs."""
    workdir: str = ""
    """Folder that the ranks start in, inside the container."""

    @model_validator(mode="after")
    def _used(self) -> Container:
        given = [name for name in ("image", "mounts", "workdir") if getattr(self, name)]
        if self.kind == "none" and given:
            fix = "Set kind to pyxis or apptainer, or take it out"
            raise ValueError(f"{given[0]} is given, but kind is none. {fix}")
        return self


def _subnet(value: str) -> str:
    if value:
        try:
            ipaddress.IPv4Network(value)
        except ValueError as error:
            raise ValueError(f"is {value!r}: {error}. Give an IPv4 network such as 10.0.0.0/16") from error
    return value


class Launcher(Part):
    """Who starts the ranks."""

    name: Literal["auto", "local", "torchrun", "ssh", "openmpi", "slurm", "kubernetes"] = "auto"
    """auto is resolved at launch: this machine, an allocation, a hostfile, or a SLURM controller."""
    runner: Literal["auto", "direct", "deepspeed", "torchrun"] = "auto"
    """Who starts the ranks of one host. direct: the launcher does, one process a rank (SLURM: an srun task);
    deepspeed or torchrun: that launcher does, once a host. auto is direct where the launcher can do that."""
    transport: Literal["ssh", "pdsh"] = "ssh"
    """How launcher=ssh reaches the hosts: by ssh alone, or by DeepSpeed's own multi-node launcher over pdsh."""
    include: str = ""
    """Hosts to use, and GPUs on them, in DeepSpeed's grammar: HOST[:GPU[,GPU...]], several joined by @."""
    exclude: str = ""
    """Hosts or GPUs to leave out, in the same grammar; not together with include."""
    hosts_command: str = ""
    """A shell command that prints the hosts: lines of a hostfile, or names alone: `scontrol show hostnames`."""
    subnet: Annotated[str, AfterValidator(_subnet)] = ""
    """An IPv4 network such as 10.0.0.0/16: each host's interface in it carries NCCL's and Gloo's traffic, and the
    ranks meet at the first host's address in it. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in env win."""
    connections: Positive = 64
    """Hosts that launcher=ssh connects to at the same time; once connected, all stay so."""
    lost_after_s: PositiveFloat = 60.0
    """Seconds without a sign of life after which launcher=ssh gives a host up, and the host ends its ranks."""
    python: str = ""
    """Interpreter of the training environment; empty: dslaunch's own on this machine, python3 elsewhere."""
    hostfile: str = ""
    """A DeepSpeed hostfile to use; written from cluster.hosts where it is empty."""
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the rendezvous; chosen at launch where it is not given."""
    confirm_above: NonNegative = 64
    """On a terminal, launches on more GPUs than this ask first."""
    bind_cpus: bool = False
    """Keep each rank to cores of its own, of its GPU's NUMA node where the host tells; what SLURM binds stays."""
    pass_env: Texts = ()
    """Names of environment variables handed over from the launching shell; their values are written nowhere."""
    timeout_minutes: Annotated[float, Field(gt=0, le=_WEEK_MINUTES)] = 30.0
    """Limit of a collective, after which a process group gives up; at most a week."""
    stage: Stage = Stage()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    container: Container = Container()

    @model_validator(mode="after")
    def _one_filter(self) -> Launcher:
        if self.include and self.exclude:
            raise ValueError(
                "include and exclude are both given, and DeepSpeed's grammar takes one. Take one out"
            )
        if self.hostfile and self.hosts_command:
            raise ValueError("hostfile and hosts_command are both given. Take one out")
        return self


class Data(Part):
    """What is read."""

    path: str = ""
    """The data set, as the program understands it; the engine `megatron` takes Megatron's prefixes."""
    tokenizer: str = ""
    """Of the data: what the program takes, such as a tokenizer's file or folder."""
    workers: NonNegative = 0
    """Processes of each rank that read samples; 0: a thread reads them; by dslaunch.runtime."""


def _every(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError("allowed are a number of steps from 0 on, and auto")


Every = Annotated[int | Literal["auto"], BeforeValidator(_every)]


class Checkpoint(Part):
    """What is saved."""

    dir: str = ""
    """Folder of the checkpoints; `checkpoints` in the run folder where it is empty."""
    every: Every = 0
    """Optimizer steps between checkpoints; 0 saves one at the end only; auto: what loses the least time by Young
    and Daly, from save_seconds and cluster.mtbf_hours."""
    save_seconds: PositiveFloat | None = None
    """Seconds that one checkpoint takes, as a run measured: its end says so, and RUN/checkpoints.jsonl."""
    in_background: bool = Field(default=False, alias="async")
    """Written while training goes on, from a copy of the states in the host's memory; by dslaunch.runtime."""
    keep: NonNegative = 0
    """Newest checkpoints that stay, the others go; 0: all stay; by dslaunch.runtime."""
    load: str = ""
    """Checkpoint to start from."""
    universal: bool = False
    """That checkpoint was converted by DeepSpeed's ds_to_universal.py, and may come from another layout."""

    @model_validator(mode="after")
    def _measured(self) -> Checkpoint:
        if self.every == "auto" and self.save_seconds is None:
            raise ValueError(
                "every is auto, and save_seconds is missing: give the seconds that a checkpoint took in a run of "
                "yours (its end says so), or a number of steps"
            )
        return self


class Run(Part):
    """Where runs are kept."""

    root: str = "runs"
    """Folder under which each run gets a folder of its own."""
