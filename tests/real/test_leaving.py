"""A rank that is done leaves: with the others, and in time also where one of them hangs or is gone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dslaunch.run.agent import free_port
from tests.real.parts import need

need("torch")

LIMIT_S = 240.0
_PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from dslaunch.runtime import world
rank, port, does = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=rank, world_size=2)
dist.all_gather_object([None, None], rank)
world.LEAVING_S = float(sys.argv[4])
if does == "hangs":
    os.kill(os.getpid(), signal.SIGSTOP)
if does == "is gone":
    os._exit(0)
if does == "is late":
    time.sleep(2)
if does == "hears late":
    store = world.distributed_c10d._get_default_store()

    class Late:
        add, set = store.add, store.set

        def wait(self, *words):
            time.sleep(2)
            store.wait(*words)

    world.distributed_c10d._get_default_store = Late
began = time.monotonic()
world.part(world.World(rank, rank, 2, torch.device("cpu")))
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


def start(rank: int, port: int, does: str, limit_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _PROGRAM, str(rank), str(port), does, str(limit_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("rank", "other", "least", "most"),
    [
        (0, "is late", 0.3, 60.0), (0, "hears late", 0.7, 60.0), (0, "hangs", 2.0, 30.0), (1, "hangs", 2.0, 30.0),
        (1, "is gone", 0.0, 30.0),
    ],
)  # fmt: skip
def test_a_rank_that_is_done_leaves(rank: int, other: str, least: float, most: float) -> None:
    """Rank 0 holds the store; the other rank hangs behind the last collective, or has ended."""
    port, limit_s = free_port(), 90.0 if "late" in other else 3.0
    ranks = {rank: start(rank, port, "", limit_s), 1 - rank: start(1 - rank, port, other, limit_s)}
    try:
        said, _ = ranks[rank].communicate(timeout=LIMIT_S)
        assert ranks[rank].returncode == 0
        assert least <= float(said) <= most
        if other == "hangs":
            assert ranks[1 - rank].poll() is None
    finally:
        for each in ranks.values():
            each.send_signal(signal.SIGKILL)
            each.wait()
