"""Ranks of dslaunch.runtime as forked processes: torch and deepspeed are imported once for all of them.

The fork server is a process of its own, which has run nothing of torch, so that forking it is safe.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0
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
    """What the ranks printed, rank by rank."""


def run_ranks(plan_json: Path, world_size: int = 2, limit_s: float = LIMIT_S) -> Outcome:
    """Run dslaunch.runtime on `plan_json` with `world_size` ranks of this host."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by deepspeed in the fork server, when it is imported there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    logs = [plan_json.parent / f"rank{rank}.txt" for rank in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(str(plan_json), rank, world_size, port, str(logs[rank])))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(limit_s)
        if rank.exitcode is None:
            rank.kill()
    return Outcome([rank.exitcode for rank in ranks], "".join(log.read_text() for log in logs))


def _rank(plan_json: str, rank: int, world_size: int, port: int, log: str) -> None:
    """What one forked process does; it ends in `leave`, as the program does."""
    from dslaunch.runtime.__main__ import leave, main

    output = open(log, "w")  # noqa: SIM115  (lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    leave(main(["--plan", plan_json]))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
