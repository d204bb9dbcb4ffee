"""Who this process is among the ranks, as its launcher says, and the process group."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan

LEAVING_S = 60.0
"""How long a rank that is done waits for the others: they end within one step, or never."""
_LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This rank's place."""

    rank: int
    local_rank: int
    size: int
    device: torch.device


def read_world(env: Mapping[str, str], plan: Plan) -> World:
    """The place of this rank, as the launcher set it in `env`.

    Raises:
        ConfigError: a variable is missing, the number of ranks is not the plan's, or there is no GPU.
    """
    missing = [name for name in _LAUNCHER_SETS if name not in env]
    if missing:
        raise ConfigError(
            f"environment: {', '.join(missing)} not set. Start dslaunch.runtime through `dslaunch launch`, "
            "deepspeed, torchrun or srun."
        )
    size = int(env["WORLD_SIZE"])
    if size != plan.world_size:
        raise ConfigError(f"WORLD_SIZE: found {size} ranks; the plan is for {plan.world_size}.")
    local_rank = int(env["LOCAL_RANK"])
    return World(int(env["RANK"]), local_rank, size, _device(plan.cluster.accelerator, local_rank))


def _device(accelerator: str, local_rank: int) -> torch.device:
    """The GPU of `local_rank`; a scheduler may show each rank its own GPU only, as number 0."""
    if accelerator == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "cluster: the plan is for CUDA GPUs, but torch sees none on this host. Check the driver and "
            "CUDA_VISIBLE_DEVICES, or plan with cluster=local."
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def join_world(world: World, plan: Plan) -> None:
    """Set this rank's device and threads (the host's cores shared out), and meet the other ranks."""
    timeout = timedelta(minutes=plan.launcher.timeout_minutes)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        dist.init_process_group("nccl", timeout=timeout, device_id=world.device)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.cluster.gpus_per_node))
    dist.init_process_group("gloo", timeout=timeout)


def part(world: World) -> None:
    """Wait, at most `LEAVING_S`, until every rank is done; then the process may end at any moment.

    The store of the process group stands on one rank, and what was sent last may still be on its way. The group
    itself is not taken down: that joins its threads, can wait for one of them without end, and leaves nothing that
    the end of the process does not. The store is asked in a thread: a call of its own can outlast its time limit
    where the rank that holds it hangs.
    """
    meeting = threading.Thread(target=_meet, args=(world.rank, world.size), daemon=True)
    meeting.start()
    meeting.join(LEAVING_S)


def _meet(rank: int, size: int) -> None:
    store, limit = distributed_c10d._get_default_store(), timedelta(seconds=LEAVING_S)
    # This rank's work is done: that whoever holds the store is gone, or late, is no fault of it.
    with contextlib.suppress(dist.DistError):
        if store.add("dslaunch/done", 1) == size:
            store.set("dslaunch/all done", "")
        store.wait(["dslaunch/all done"], limit)
        # Rank 0, which may hold the store, leaves last: torch prints a trace where a wait loses the store.
        if rank > 0 and store.add("dslaunch/left", 1) == size - 1:
            store.set("dslaunch/all left", "")
        if rank == 0 and size > 1:
            store.wait(["dslaunch/all left"], limit)
