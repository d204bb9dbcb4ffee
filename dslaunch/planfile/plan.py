"""The decisions of a plan: what plan.json holds and a review is about."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

PLAN_SCHEMA = "dslaunch.plan/1"

Setting = bool | int | float | str


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage of one component."""

    stage: int
    ranks: tuple[int, ...]
    """Global ranks that hold this stage."""
    layers: int
    params_on_rank: int
    """Parameters that one rank of the stage computes with: after TP and PP, before ZeRO."""
    trainable_on_rank: int
    """Of those, the ones that get a gradient."""


@dataclass(frozen=True)
class ComponentPlan:
    """The layout of one component. micro_batch * num_microbatches * dp = global_batch."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    zero: int
    """ZeRO stage 0-3; FSDP2 counts as 3, DDP as 0."""
    offload: str
    """none | cpu, nvme (optimizer states) | cpu_params, nvme_params (ZeRO-3: parameters as well)"""
    recompute: str
    """none | selective | full"""
    micro_batch: int
    num_microbatches: int
    rank_offset: int
    params: int
    """Parameters of the whole component."""
    trainable: int
    lr: float
    weight_decay: float
    layers_per_stage: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    etp: int = 0
    """Ranks that each routed expert is cut over; 0: tp of them, as the rest of the layer."""

    @property
    def expert_tp(self) -> int:
        """Ranks that each routed expert is cut over."""
        return self.etp or self.tp

    @property
    def ranks(self) -> int:
        """Ranks that the component's grid spans."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class ClusterPlan:
    """The hardware as planned for."""

    gpu: str
    """The GPU's full name, such as A100-SXM4-80GB, or CPU."""
    accelerator: str
    """cuda | rocm | cpu"""
    nodes: int
    gpus_per_node: int
    local: bool
    """This machine: launched without hostfile or scheduler."""
    hosts: tuple[str, ...] = ()
    """Host names, in rank order, where the configuration names them."""
    nvlink_domain: int = 0
    """Ranks next to one another that NVLink or Infinity Fabric joins; 1: none, 0: written before it was said."""
    slots: tuple[int, ...] = ()
    """GPUs of each host, in rank order, where they differ; `nodes` and `gpus_per_node` count equal parts then."""
    switches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Hosts by leaf switch, in rank order, where the configuration names them."""
    kinds: tuple[int, ...] = ()
    """Hosts of each kind, in rank order, where SLURM is asked for several: the components of one job."""

    @property
    def by_host(self) -> tuple[int, ...]:
        """GPUs of each host, in rank order."""
        return self.slots or (self.gpus_per_node,) * self.nodes

    @property
    def shape(self) -> str:
        """Hosts x GPUs, such as `8 x 8`, or `2 x 8 + 1 x 4` where they differ."""
        sizes = self.by_host
        return " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))

    def host_of(self, rank: int) -> int:
        """Which host, counted from 0, has this rank."""
        return bisect_right(list(accumulate(self.by_host)), rank)


@dataclass(frozen=True)
class TrainingPlan:
    """What decides convergence, and the schedule."""

    global_batch: int
    """Samples per optimizer step."""
    seq_len: int
    """Tokens per sample as the trunk (the LLM) sees them."""
    precision: str
    """bf16 | fp16 | fp32"""
    grad_accum_dtype: str
    """bf16 | fp16 | fp32"""
    steps: int
    """Optimizer steps."""
    seed: int
    clip: float
    """Global gradient norm above which gradients are scaled down; 0 is off."""
    schedule: str
    """1f1b | gpipe | interleaved | zb-h1: the order of micro-batches in the pipeline"""
    overlap_comm: bool
    sequence_parallel: bool
    optimizer: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_steps: int
    lr_schedule: str
    """constant | linear | cosine | wsd"""
    min_lr: float
    lr_decay_steps: int = 0
    """wsd: last steps, over which the learning rate falls."""
    lr_decay_shape: str = ""
    """wsd: linear | cosine | sqrt"""
    macro_batches: int = 1
    """Parts of a step that go one after another through all components, where they share ranks."""


@dataclass(frozen=True)
class EnginePlan:
    """Who executes the plan."""

    name: str
    version: str
    """The framework version that the files are rendered for."""
    sharding: str
    """zero | ddp | fsdp2 | hsdp"""
    path: str = ""
    """A checkout of Megatron, for the engines that run its script."""
    shard_size: int = 0
    """hsdp: ranks that share one copy of the states; 0: all replicas do."""
    modes: dict[str, dict[str, Setting]] = field(default_factory=dict)
    """What it does beside the layout, such as zero_plus_plus or nvme, by the settings of each; empty: nothing."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of the framework's own, as the user gave them (engine.extra)."""


@dataclass(frozen=True)
class ProgramPlan:
    """What runs on every rank."""

    script: str = ""
    """A Python file, as the user gave it; empty where a module runs."""
    module: str = ""
    """A Python module, run as `python -m`."""
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class FabricVariable:
    """An environment variable that the way between the GPUs calls for."""

    name: str
    value: str
    """Where the rank's host has the variable already, that value stays."""
    fabric: str
    """The file of conf/fabric that it comes from."""
    reason: str
    source: str


@dataclass(frozen=True)
class LauncherPlan:
    """Who starts the ranks."""

    name: str
    """auto | local | torchrun | ssh | openmpi | slurm | kubernetes; auto is resolved at launch."""
    python: str
    """Interpreter of the training environment, as the user gave it; empty where it was left open."""
    hostfile: str
    """The user's hostfile; empty where one is rendered."""
    master_port: int
    """0: chosen at launch."""
    confirm_above: int
    """On a terminal, launches on more GPUs than this ask first."""
    timeout_minutes: float
    """Limit of a collective."""
    pass_env: tuple[str, ...]
    """Environment variables handed over by name; their values are in no file."""
    runner: str = "auto"
    """auto | direct | deepspeed | torchrun: who starts the ranks of one host."""
    transport: str = "ssh"
    """ssh | pdsh: how launcher=ssh reaches the hosts."""
    include: str = ""
    """Hosts and GPUs to use, in DeepSpeed's grammar; empty: all."""
    exclude: str = ""
    """Hosts and GPUs to leave out."""
    hosts_command: str = ""
    """A shell command that prints the hosts at launch."""
    subnet: str = ""
    """The IPv4 network that the ranks' traffic goes over; empty: the frameworks choose."""
    connections: int = 64
    """Hosts that launcher=ssh connects to at the same time."""
    lost_after_s: float = 60.0
    """Seconds without a sign of life after which launcher=ssh gives a host up."""
    continuations: int = 0
    """SLURM jobs queued behind the first, each to go on where the one before failed or ran out of time."""
    placement: tuple[str, ...] = ()
    """What SLURM is asked of the nodes' places: `OPTION: what it means here`."""
    stage_from: str = ""
    """Folder whose copy on every node's own disk the ranks work in; empty: none is made."""
    stage_to: str = ""
    """Folder on the nodes that the copy gets a folder of its own in."""
    stage_exclude: tuple[str, ...] = ()
    """Patterns of what is left out of it."""
    bind_cpus: bool = False
    """Each rank is kept to cores of its own."""

    @property
    def finds_hosts(self) -> bool:
        """The hosts become known at the launch: from a file, or from what a command prints."""
        return bool(self.hostfile or self.hosts_command)


@dataclass(frozen=True)
class FilesPlan:
    """What the program reads and writes; each as the user gave it."""

    data_path: str = ""
    data_workers: int = 0
    """Processes of a rank that read samples; 0: a thread does."""
    tokenizer: str = ""
    weights: str = ""
    checkpoint_dir: str = ""
    """Empty: the folder `checkpoints` in the run folder."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves one at the end only."""
    checkpoint_async: bool = False
    """Whether checkpoints are written while training goes on."""
    checkpoint_keep: int = 0
    """How many stay; 0: all."""
    checkpoint_load: str = ""


@dataclass(frozen=True)
class ProfilePlan:
    """A profiler around chosen ranks."""

    kind: str = ""
    """torch | nsys; empty: none."""
    ranks: tuple[int, ...] = ()
    first_step: int = 0
    """The first optimizer step that is recorded, counted from 1 in each attempt."""
    steps: int = 0
    nsys_options: tuple[str, ...] = ()
    """Options of `nsys profile` that the user gave."""


@dataclass(frozen=True)
class SupervisionPlan:
    """When a run hangs, and what follows when an attempt fails."""

    restart_max: int = 0
    """Restarts that may bring no new step."""
    restart_wait_s: float = 5.0
    """Seconds before the first restart; doubled with each that brings no new step."""
    restart_actions: dict[str, str] = field(default_factory=dict)
    """By cause, what is done in place of the default of dslaunch/run/causes.yaml."""
    spares: tuple[str, ...] = ()
    """Hosts that wait to take the place of one that fails."""
    elastic_min_nodes: int = 0
    """Fewest nodes that the run is planned anew for where hosts are lost; 0: it is not."""
    watchdog_minutes: float = 0.0
    """Minutes without a step, after the first; 0 is no limit."""
    watchdog_start_minutes: float = 0.0
    """Minutes until the first step; 0 is no limit."""
    min_speed: float | None = None
    """Least share of the planned speed at which dslaunch.runtime goes on; 0: none; None: by the plan's band."""
    node_mtbf_hours: float = 0.0
    """Mean hours between failures of one node; 0: not known."""
    saving_breaches: tuple[str, ...] = ()
    """Thresholds at whose breach the program is asked for a checkpoint, by name, sorted."""
    stopping_breaches: tuple[str, ...] = ()
    """Thresholds whose breach ends the run, by name, sorted."""
    webhook: str = ""
    """Environment variable with the address that is told how the run goes; empty: none."""
    prometheus_dir: str = ""
    """Folder of the text file with the run's figures; empty: none is written."""
    wandb: str = ""
    """Project of Weights & Biases that the supervisor logs to; empty: none."""
    wandb_mode: str = "offline"
    """offline | online"""


@dataclass(frozen=True)
class Plan:
    """Decisions. Written as plan.json."""

    name: str
    recipe: str
    strategy: str
    world_size: int
    global_batch: int
    cluster: ClusterPlan
    training: TrainingPlan
    engine: EnginePlan
    engines: tuple[str, ...]
    """Every engine that can execute this plan, the chosen one first."""
    program: ProgramPlan
    launcher: LauncherPlan
    files: FilesPlan
    components: dict[str, ComponentPlan]
    env_names: tuple[str, ...]
    """Environment variables that the user sets."""
    model: dict[str, Any]
    """The model's configuration as validated: what the program builds from."""
    accepted: tuple[str, ...] = ()
    """Rules that the user waived."""
    supervision: SupervisionPlan = SupervisionPlan()
    fabric: tuple[FabricVariable, ...] = ()
    """Variables that the cluster's fabric calls for, by name."""
    profile: ProfilePlan = ProfilePlan()
    schema: str = PLAN_SCHEMA
