"""How many processes accelerate starts on each machine, and which machine takes itself for which."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import Started, started
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import jobs, srun_nodes

_SOURCE = (
    "huggingface/accelerate:src/accelerate/commands/launch.py, utils/launch.py prepare_multi_gpu_env 1.15.0, run"
)
_NODE = (4, 8)
"""GPUs that one machine has, as a rule."""
_BY_TORCHRUN = ("standard", "nossh")


@rule("accelerate.total", severity="wrong", raised_by="nobody", evidence=_SOURCE)
def total(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A num_processes that looks like one machine's, and is that of all machines together."""
    for start in started(files):
        machines, count = start.number("num_machines"), start.number("num_processes")
        flag = start.flag("num_processes")
        if machines is None or count is None or machines < 2 or flag is None or count % machines:
            continue
        planned = start.config.get("num_processes") if start.config else None
        if isinstance(planned, int) and planned == count * machines and start.config:
            message = (
                f"--num_processes {count} is the total of {machines} machines, {count // machines} on each; "
                f"{start.config.name} has {planned}."
            )
            yield start.hit(flag, message, f"Take --num_processes out, or write {planned}.")
        elif count in _NODE:
            message = f"--num_processes {count} is the total of {machines} machines: {count // machines} on each."
            found = start.hit(flag, message, f"Write {count * machines} where each has {count} GPUs.")
            listed = (start.value("gpu_ids") or "").count(",") + 1
            yield Hit(found.name, found.at, found.message, found.fix, None if listed == count else "info")


@rule("accelerate.machine-rank", severity="hang", raised_by="nobody", evidence=_SOURCE)
def machine_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """srun starts one line on several nodes, and each takes itself for the same machine."""
    held = {job.file.name: job for job in jobs(files)}
    for start in started(files):
        srun, machines = start.command.launcher("srun"), start.number("num_machines")
        if srun is None or machines is None or machines < 2 or not static(start):
            continue
        job = held.get(start.file.name)
        nodes = srun_nodes(job, srun.options) if job else None
        if (nodes is not None and nodes < 2) or not start.launcher.options.complete:
            continue
        flag, given = start.flag("machine_rank"), start.value("machine_rank")
        fix = "Let each task fill in its own: srun bash -c 'accelerate launch --machine_rank $SLURM_NODEID ...'."
        if flag is not None and given is not None and is_told(given):
            message = f"--machine_rank {given} is that of all {machines} machines: they never meet."
            yield start.hit(flag, message, fix)
        elif flag is None and start.config and start.config.get("machine_rank") is not None:
            rank = start.config.get("machine_rank")
            message = f"{start.config.name} says machine_rank {rank} to all {machines} machines: they never meet."
            yield start.hit(None, message, fix)


@rule("accelerate.hosts", severity="wrong", raised_by="nobody", evidence=_SOURCE)
def hosts(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Under DeepSpeed on each machine, and each trains alone: its launcher wants one start, and a hostfile."""
    for start in started(files):
        machines, rank = start.number("num_machines"), start.flag("machine_rank")
        launcher = start.flag(_LAUNCHER) or _held(start, "deepspeed_config", _LAUNCHER)
        listed = start.flag("deepspeed_hostfile") or _held(start, "deepspeed_config", "deepspeed_hostfile")
        by_file = str(_held(start, "distributed_type")).upper() == "DEEPSPEED"
        deepspeed = by_file or start.flag("use_deepspeed") is not None
        named = start.launcher.options.has("--config_file", "--config-file") and start.config is None
        told = start.launcher.options.complete and not named
        if machines and machines > 1 and deepspeed and not launcher and not listed and told:
            ranks = " reads no --machine_rank, and" if rank is not None else ":"
            message = (
                f"DeepSpeed's launcher (pdsh, the default){ranks} there is no hostfile: each of the {machines} "
                "machines trains by itself."
            )
            fix = "Add --deepspeed_multinode_launcher standard; or start it once, with --deepspeed_hostfile."
            yield start.hit(rank or start.flag("num_machines"), message, fix)


_LAUNCHER = "deepspeed_multinode_launcher"


def _held(start: Started, *path: str) -> object:
    """What the configuration file says."""
    return start.config.get(*path) if start.config else None


def static(start: Started) -> bool:
    """Whether machine_rank decides which node it is."""
    backend = start.value("rdzv_backend") or (start.config.get("rdzv_backend") if start.config else None)
    deepspeed = start.flag("use_deepspeed") is not None
    launcher = start.value("deepspeed_multinode_launcher")
    if start.config is not None:
        deepspeed = deepspeed or str(start.config.get("distributed_type")).upper() == "DEEPSPEED"
        launcher = launcher or start.config.get("deepspeed_config", "deepspeed_multinode_launcher")
    return backend in (None, "static") and (not deepspeed or launcher in _BY_TORCHRUN)
