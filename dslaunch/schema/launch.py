"""Where and how it runs: engine, launcher, program, files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dslaunch.schema.base import NonNegative, Part, Positive, PositiveFloat, Texts
from dslaunch.schema.deepspeed import ActivationCheckpointing, Monitor
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
    account: Word = ""
    time: TimeLimit = ""
    """Time limit, such as 12:00:00 or 2-00:00:00 (quote it in YAML)."""
    qos: Word = ""
    constraint: Word = ""
    exclude: Nodes = ""
    """Nodes to leave out, such as n[1-2]."""
    reservation: Word = ""
    switches: Switches = ""
    """Leaf switches wanted, optionally @ the time to wait for them: 1@00:30:00."""
    comment: str = ""
    mem: Memory = ""
    """Memory per node; empty takes the site's default, 0 all of it."""
    exclusive: bool = True
    """Whole nodes."""
    cpus_per_task: Positive | None = None
    """CPU cores per rank; the node's cores shared out where it is not given."""
    signal_before_s: NonNegative = 0
    """Seconds before the time limit at which every rank gets SIGTERM, for programs that then save; 0 is never."""
    modules: Texts = ()
    """Environment modules to load, in order."""
    setup: Texts = ()
    """Shell lines run on each node's batch step before training."""
    sbatch_extra: Options = ()
    """Further #SBATCH options, each as one line without `#SBATCH`, such as --mail-type=END."""


class Container(Part):
    """The container that each rank runs in."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    image: str = ""
    """Image or path, as the container tool takes it."""
    mounts: Texts = ()
    """HOST:CONTAINER pairs."""
    workdir: str = ""

    @model_validator(mode="after")
    def _used(self) -> Container:
        given = [name for name in ("image", "mounts", "workdir") if getattr(self, name)]
        if self.kind == "none" and given:
            fix = "Set kind to pyxis or apptainer, or take it out"
            raise ValueError(f"{given[0]} is given, but kind is none. {fix}")
        return self


class Launcher(Part):
    """Who starts the ranks."""

    name: Literal["auto", "local", "torchrun", "ssh", "slurm"] = "auto"
    """auto is resolved at launch: this machine, an allocation, a hostfile, or a SLURM controller."""
    python: str = ""
    """Interpreter of the training environment; empty: dslaunch's own on this machine, python3 elsewhere."""
    hostfile: str = ""
    """A DeepSpeed hostfile to use; written from cluster.hosts where it is empty."""
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the rendezvous; chosen at launch where it is not given."""
    confirm_above: NonNegative = 64
    """On a terminal, launches on more GPUs than this ask first."""
    pass_env: Texts = ()
    """Names of environment variables handed over from the launching shell; their values are written nowhere."""
    timeout_minutes: Annotated[float, Field(gt=0, le=_WEEK_MINUTES)] = 30.0
    """Limit of a collective, after which a process group gives up; at most a week."""
    slurm: Slurm = Slurm()
    container: Container = Container()


class Data(Part):
    """What is read."""

    path: str = ""
    """The data set, as the program understands it; the engine `megatron` takes Megatron's prefixes."""
    tokenizer: str = ""


class Checkpoint(Part):
    """What is saved."""

    dir: str = ""
    """Folder of the checkpoints; `checkpoints` in the run folder where it is empty."""
    every: NonNegative = 0
    """Optimizer steps between checkpoints; 0 saves one at the end only."""
    load: str = ""
    """Checkpoint to start from."""
    universal: bool = False
    """That checkpoint was converted by DeepSpeed's ds_to_universal.py, and may come from another layout."""


class Run(Part):
    """Where runs are kept."""

    root: str = "runs"
    """Folder under which each run gets a folder of its own."""
