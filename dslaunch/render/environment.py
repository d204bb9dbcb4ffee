"""The environment of every rank: what the user sets, and the little that an engine needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.planfile.plan import FabricVariable
from dslaunch.render.accelerate import accelerate_environment
from dslaunch.render.timeouts import whole_minutes
from dslaunch.schema.config import RunConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# deepspeed/launcher/multinode_runner.py:add_export, 0.19.8: a value is stripped, and put in double quotes
# where it holds an unusual character; pdsh then replaces %-sequences, and a remote shell reads the line.
_CARRIED = re.compile(r"(?! )[A-Za-z0-9_@+=:,./ -]*(?<! )")
# Megatron-DeepSpeed too: megatron/initialize.py calls deepspeed.init_distributed(), not with its own
# --distributed-timeout-minutes; deepspeed/constants.py reads DEEPSPEED_TIMEOUT (0.19.8).
_DEEPSPEED_ENGINES = frozenset({"deepspeed", "native", "megatron_deepspeed"})
_BLACKWELL = re.compile(r"(GB|B)\d")


_SET_FOR_EACH_RANK = frozenset({
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_LAUNCHERS_OWN = ("SLURM_", "DSLAUNCH_", "TORCHELASTIC_")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Variable:
    """One line of env.sh."""

    name: str
    value: str
    reason: str = ""
    """Why dslaunch sets it; empty where the user does."""
    keeps: bool = False
    """Where the rank's host has it already, that value stays."""


def variables(plan: Plan, config: RunConfig) -> tuple[Variable, ...]:
    """Sorted by name; what the user sets wins.

    Raises:
        ConfigError: a name that no shell takes or that a launcher sets, a value with a NUL, or too few GPUs.
    """
    for name, value in config.env.items():
        _check_name(f"env.{name}", name)
        _check_reserved(name)
        _check_visible(name, value, plan)
        if "\0" in value:
            raise ConfigError(f"env.{name}: holds a NUL character, which no environment carries. Take it out")
    fabric = {each.name: _of_fabric(each) for each in plan.fabric}
    needed = {each.name: each for each in _needed(plan, config)}
    given = {name: Variable(name, value) for name, value in config.env.items()}
    return tuple(sorted((fabric | needed | given).values(), key=lambda each: each.name))


def _of_fabric(variable: FabricVariable) -> Variable:
    return Variable(variable.name, variable.value, f"{variable.fabric}: {variable.reason}", keeps=True)


def passed_names(plan: Plan) -> tuple[str, ...]:
    """Names handed over from the launching shell, sorted.

    Raises:
        ConfigError: a name that no shell takes.
    """
    for name in plan.launcher.pass_env:
        _check_name("launcher.pass_env", name)
    return tuple(sorted(set(plan.launcher.pass_env)))


def carried(all_variables: tuple[Variable, ...]) -> tuple[Variable, ...]:
    """Those that DeepSpeed's runner can carry to other hosts unchanged, for the interpreter's own start there.

    env.sh sets every variable again on each rank, so the others are missing only until then. Those that a host may
    have already are not carried, for they would hide the host's.
    """
    return tuple(each for each in all_variables if _CARRIED.fullmatch(each.value) and not each.keeps)


def _check_name(key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}: {name!r} is no name of a variable. Allowed are letters, digits and _, no digit first"
        )


def is_reserved(name: str) -> bool:
    """Whether the launcher gives this variable to each rank, so that env.sh must not set it for all."""
    return name in _SET_FOR_EACH_RANK or name.startswith(_LAUNCHERS_OWN)


def _check_reserved(name: str) -> None:
    if is_reserved(name):
        fix = "Set launcher.master_port" if name == "MASTER_PORT" else "Take it out; cluster= decides the ranks"
        raise ConfigError(f"env.{name}: the launcher sets {name} for each rank, and env would overwrite it. {fix}")


def _check_visible(name: str, value: str, plan: Plan) -> None:
    named, needed = len(value.split(",")) if value else 0, plan.cluster.gpus_per_node
    if name in _VISIBLE and plan.cluster.accelerator != "cpu" and named < needed:
        raise ConfigError(
            f"env.{name}: names {named} GPUs, the plan uses {needed} on each node. Name as many, or take it out"
        )


def _needed(plan: Plan, config: RunConfig) -> list[Variable]:
    found = [_threads(plan, config)]
    if plan.cluster.accelerator == "cpu":
        found.append(Variable("DS_ACCELERATOR", "cpu", "DeepSpeed looks no further for a device"))
    if plan.engine.name in _DEEPSPEED_ENGINES:
        minutes = str(whole_minutes(plan.launcher.timeout_minutes))
        found.append(Variable("DEEPSPEED_TIMEOUT", minutes, "launcher.timeout_minutes: limit of a collective"))
    if config.engine.accelerate:
        reason = "engine.accelerate: as `accelerate launch` sets it from accelerate.yaml"
        found += [Variable(name, value, reason) for name, value in accelerate_environment(plan, config).items()]
    if plan.engine.name == "megatron" and _one_connection(plan):
        reason = "Megatron stops without it where tp or cp is above 1, before Blackwell"
        found.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason))
    return found


def _threads(plan: Plan, config: RunConfig) -> Variable:
    given = config.launcher.slurm.cpus_per_task if plan.launcher.name in ("auto", "slurm") else None
    if given:
        return Variable("OMP_NUM_THREADS", str(given), "launcher.slurm.cpus_per_task: cores of a rank")
    cores = max(1, config.cluster.node.cpu_cores // plan.cluster.gpus_per_node)
    return Variable("OMP_NUM_THREADS", str(cores), "the node's cores, shared out among its ranks")


def _one_connection(plan: Plan) -> bool:
    split = any(component.tp > 1 or component.cp > 1 for component in plan.components.values())
    return split and not _BLACKWELL.match(plan.cluster.gpu)
