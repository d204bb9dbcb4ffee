"""`dslaunch.context/1`: what a template is given. Names here are a promise to the templates of a site."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.hosts import HOST_FIX, is_host
from dslaunch.planfile import Plan
from dslaunch.render.environment import Variable, carried, passed_names, variables
from dslaunch.render.profile import ProfileContext, counts, profile_context
from dslaunch.render.program import MEGATRON_ENGINES, check_program, launch_blocker, program_words
from dslaunch.render.slurm import SlurmContext, slurm_context
from dslaunch.schema.config import RunConfig

CONTEXT_SCHEMA = "dslaunch.context/1"
SEVERAL_NODES_PORT = "29500"
"""Rendezvous port of several nodes where none is given; a single node takes a free one at launch."""
_TORCHRUN_ENGINES = frozenset({"torch", "megatron", "megatron_mimo"})


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    slots: int
    """Ranks on it."""


@dataclass(frozen=True)
class Context:
    """The same for every template; a template that places something of its own gets it beside these.

    ds_config.json.j2 gets `config` (the configuration), megatron_args.txt.j2 `flags` (flag, values) pairs.
    Filters: `json` writes a value as sorted JSON, `sh` quotes a text for the shell (shlex.quote). A comment of
    a template is {## like this ##}, since `{#` belongs to the shell.
    """

    schema: str
    name: str
    """Name of the run."""
    world_size: int
    nodes: int
    gpus_per_node: int
    """Ranks per node; on a CPU cluster too."""
    slots: tuple[int, ...]
    """Ranks of each host, in rank order, where they differ; nodes and gpus_per_node count equal parts then."""
    accelerator: str
    """cuda | rocm | cpu"""
    remote: bool
    """Ranks stand on other hosts than the one that runs launch.sh."""
    hosts: tuple[Host, ...]
    hostfile: str
    """The hostfile that the user named; empty where one is rendered or written at launch."""
    python: str
    """Interpreter of the training environment."""
    runner: str
    """Who starts the ranks in launch.sh: deepspeed | torchrun."""
    master_port: str
    """Empty: a free one is chosen at launch."""
    slurm_port: str
    """Rendezvous port under SLURM; empty: made of the job's number."""
    blocker: str
    """Why a launch cannot start, in a sentence; empty where it can."""
    program: tuple[str, ...]
    """What follows the interpreter, each a shell word that needs no more quoting."""
    ds_config: bool
    """There is one DeepSpeed configuration for the whole model."""
    megatron: bool
    """The program is Megatron's, and its arguments stand in megatron_args.txt."""
    megatron_path: str
    """A checkout of Megatron; empty where DSLAUNCH_MEGATRON_PATH names it at launch."""
    variables: tuple[Variable, ...]
    carried: tuple[Variable, ...]
    """Those of `variables` that DeepSpeed's runner carries to other hosts."""
    pass_env: tuple[str, ...]
    bind_cpus: bool
    """cores.py keeps each rank to cores of its own."""
    subnet: str
    """The IPv4 network whose interface NCCL and Gloo use on each host; empty: they choose."""
    slurm: SlurmContext
    preflight: bool
    """job.sbatch asks the nodes how they are before it starts the ranks."""
    stage_to: str
    """Folder on the nodes that the code is copied to; empty where it is not."""
    counters: bool
    """The first rank of each host starts gpus.py, which tells what its GPUs do."""
    profile: ProfileContext | None
    """The profiler around chosen ranks; none where nothing is profiled."""


def context(plan: Plan, config: RunConfig, ds_config: bool) -> Context:
    """The context of a plan; raises ConfigError for what a script cannot hold."""
    cluster = plan.cluster
    check_program(config)
    environment = variables(plan, config)
    port = str(plan.launcher.master_port or "")
    named = cluster.hosts or plan.launcher.finds_hosts
    remote = not cluster.local and (cluster.nodes > 1 or bool(named))
    return Context(
        schema=CONTEXT_SCHEMA,
        name=plan.name,
        world_size=plan.world_size,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        slots=cluster.slots,
        accelerator=cluster.accelerator,
        remote=remote,
        hosts=_hosts(plan),
        hostfile=plan.launcher.hostfile,
        python=plan.launcher.python or "python3",
        runner=_runner(plan),
        master_port=port or (SEVERAL_NODES_PORT if remote else ""),
        slurm_port=port,
        blocker=launch_blocker(plan, config.engine.extra),
        program=program_words(plan),
        ds_config=ds_config,
        megatron=plan.engine.name in MEGATRON_ENGINES,
        megatron_path=plan.engine.path,
        variables=environment,
        carried=carried(environment),
        pass_env=passed_names(plan),
        bind_cpus=plan.launcher.bind_cpus,
        subnet=plan.launcher.subnet,
        slurm=slurm_context(plan, config),
        preflight=config.preflight.enabled,
        stage_to=plan.launcher.stage_to,
        counters=counts(plan),
        profile=profile_context(plan),
    )


def _runner(plan: Plan) -> str:
    if plan.launcher.name == "kubernetes":
        return "torchrun"
    if plan.launcher.runner in ("deepspeed", "torchrun"):
        return plan.launcher.runner
    return "torchrun" if plan.engine.name in _TORCHRUN_ENGINES else "deepspeed"


def _hosts(plan: Plan) -> tuple[Host, ...]:
    """The hosts in rank order; none where their names are not known before the launch."""
    cluster = plan.cluster
    if plan.launcher.finds_hosts:
        return ()
    names = ("localhost",) if cluster.local else cluster.hosts
    for name in names:
        if not is_host(name):
            raise ConfigError(f"cluster.hosts: {name!r} is no host name. {HOST_FIX}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"cluster.hosts: {twice!r} stands twice; DeepSpeed refuses such a hostfile. Name each host once"
        )
    if not names:
        return ()
    slots = cluster.slots or (cluster.gpus_per_node,) * len(names)
    return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))


def as_variables(value: Context) -> dict[str, Any]:
    """The fields by name, as a template sees them."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
