"""Ranks of dslaunch.runtime as forked processes: torch and deepspeed are imported once for all of them.

The fork server is a process of its own, which has run nothing of torch, so that forking it is safe.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from dslaunch.run.agent import free_port

LIMIT_S = 240.0
STACKS_S = 5.0
"""What a hanging rank has for writing its stacks before it is killed."""
PRELOAD = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "dslaunch.runtime.engine_deepspeed",
    "dslaunch.runtime.engine_native",
    "dslaunch.runtime.engine_torch",
    "dslaunch.runtime.program",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.utils.tensorboard",
]
"""What a run imports sooner or later; torch.compile's modules, which DeepSpeed's Muon asks for, take longest."""


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended."""

    statuses: list[int | None]
    """Exit status per rank; None is a rank that had to be killed."""
    output: str
    """What the ranks printed, rank by rank; of one that had to be killed, the stack of every thread too."""


def run_ranks(
    plan_json: Path, world_size: int = 2, limit_s: float = LIMIT_S, spoil: Callable[[int], None] | None = None
) -> Outcome:
    """Run dslaunch.runtime on `plan_json` with `world_size` ranks of this host.

    Args:
        spoil: called in each rank with its number before the program: what breaks it.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by deepspeed in the fork server, when it is imported there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    logs = [plan_json.parent / f"rank{rank}.txt" for rank in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(str(plan_json), rank, world_size, port, str(logs[rank]), spoil))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + limit_s
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank in ranks if rank.exitcode is None]
    for rank in hanging:
        os.kill(rank.pid or 0, signal.SIGUSR2)
    if hanging:
        time.sleep(STACKS_S)
    for rank in hanging:
        rank.kill()
        rank.join()
    statuses = [None if rank in hanging else rank.exitcode for rank in ranks]
    return Outcome(statuses, "".join(log.read_text() for log in logs))


def _rank(
    plan_json: str, rank: int, world_size: int, port: int, log: str, spoil: Callable[[int], None] | None
) -> None:
    """What one forked process does; it ends in `leave`, as the program does."""
    from dslaunch.runtime.__main__ import leave, main

    output = open(log, "w")  # noqa: SIM115  (lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.register(signal.SIGUSR2, file=output, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if spoil:
        spoil(rank)
    leave(main(["--plan", plan_json]))


def wait_for(ranks: Sequence[BaseProcess], limit_s: float) -> None:
    """Until all have ended, or 30 s after one has failed; who is left then, or at the limit, is killed."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            end = min(end, time.monotonic() + 30)
        time.sleep(0.2)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()
