"""A stand-in for training that needs the standard library alone: ranks in lockstep, a loss, checkpoints, a fault.

    chaos_train.py CHECKPOINTS STEPS FAULT RANK STEP

Every step the ranks add up one number each, over TCP, and move one weight by the sum: whatever is lost or done
twice shows in the loss. Rank 0 saves every second step. In the first attempt FAULT happens on RANK after STEP.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import Any

EVERY = 2
PACE_S = 0.1
HELD_S = {"node drained": 3, "job preempted": 90, "slurmd killed": 180, "time limit": 300}
"""How long the rank stays at the step at which the fault is done to the job."""
AGAIN = ("program fails again", "ranks with uneven data")
"""Faults of every attempt, within their step: nobody completes it, and no checkpoint leads past it."""
_SMALL_DISK = 2**24
_PAD = "x" * 100_000
"""Makes a checkpoint large enough to fill a small disk."""


def gradient(step: int, rank: int) -> float:
    """What `rank` brings to `step`."""
    return random.Random(step * 1000 + rank).uniform(0.5, 1.5)


def moved(weight: float, step: int, world: int) -> float:
    """The weight after `step`."""
    return weight - 0.1 * weight * sum(gradient(step, rank) for rank in range(world)) / world


def curve(steps: int, world: int) -> list[float]:
    """The losses of an uninterrupted run."""
    weight, losses = 1.0, []
    for step in range(1, steps + 1):
        weight = moved(weight, step, world)
        losses.append(weight**2)
    return losses


def newest(folder: Path) -> tuple[int, float]:
    """Step and weight of the newest whole checkpoint; those of the start where there is none."""
    for path in sorted(folder.glob("step-*/state"), reverse=True):
        text, _, crc = path.read_text(errors="replace").rpartition("\n")
        if crc == str(zlib.crc32(text.encode())):
            saved = json.loads(text)
            return saved["step"], saved["weight"]
        print(f"{path} is broken and passed over")
    return 0, 1.0


def save(folder: Path, step: int, weight: float) -> None:
    """Write a checkpoint whole, or not at all."""
    text = json.dumps({"step": step, "weight": weight, "pad": _PAD})
    new = folder / f".step-{step:04d}"
    new.mkdir(exist_ok=True)
    with (new / "state").open("w") as stream:
        stream.write(f"{text}\n{zlib.crc32(text.encode())}")
        stream.flush()
        os.fsync(stream.fileno())
    place = folder / f"step-{step:04d}"
    if place.exists():
        shutil.rmtree(place)
    new.rename(place)


class Ranks:
    """The others. Rank 0 adds up and hands out; its address stands in the run folder."""

    def __init__(self, run: Path, rank: int, world: int) -> None:
        self.rank = rank
        where = run / f"meet-{os.environ['DSLAUNCH_ATTEMPT']}"
        if rank == 0:
            server = socket.create_server(("", _port()))
            host = os.environ["MASTER_ADDR"]
            new = where.with_suffix(".new")
            new.write_text(f"{host} {server.getsockname()[1]}")
            new.rename(where)
            self.files = [server.accept()[0].makefile("rw") for _ in range(world - 1)]
        else:
            while not where.exists():
                time.sleep(0.05)
            host, port = where.read_text().split()
            self.files = [socket.create_connection((host, int(port))).makefile("rw")]

    def total(self, value: float) -> float:
        """The sum of every rank's value."""
        if self.rank:
            return float(self._ask(self.files[0], value))
        values = [value, *(float(_heard(file.readline())) for file in self.files)]
        for file in self.files:
            print(sum(sorted(values)), file=file, flush=True)
        return sum(sorted(values))

    def _ask(self, file: Any, value: float) -> str:
        print(value, file=file, flush=True)
        return _heard(file.readline())


def _heard(line: str) -> str:
    if not line:
        raise ConnectionError("Connection closed by peer")
    return line


def _port() -> int:
    """torchrun itself listens on the master's port; elsewhere rank 0 does."""
    return 0 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else int(os.environ["MASTER_PORT"])


def strike(fault: str, checkpoints: Path) -> None:
    """Let the fault happen to this process, or wait for what is done from outside."""
    time.sleep(HELD_S.get(fault, 0))
    if fault == "rank killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "rank frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "rank out of memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
        bytearray(2**29)
    if fault in ("disk full", "run folder's disk full"):
        disk = os.statvfs(checkpoints)
        assert disk.f_blocks * disk.f_frsize < _SMALL_DISK, "only a disk of its own is filled"
        with (checkpoints / "filler").open("wb", buffering=0) as stream:
            while True:
                stream.write(b"x" * 4096)
    if fault == "newest checkpoint corrupt":
        with max(checkpoints.glob("step-*/state")).open("r+") as stream:
            stream.write("garbage")
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("program fails", "program fails again"):
        raise ValueError("a batch that nobody expected")
    if fault == "configuration wrong":
        sys.exit(2)
    if fault == "ranks with uneven data":
        sys.exit(0)  # this rank's samples are at an end, and the others wait for it


def main() -> None:
    from dslaunch.progress import resuming, step, watch

    watch()
    checkpoints, fault = Path(sys.argv[1]), sys.argv[3]
    steps, struck, at = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    run, rank, world = Path(os.environ["DSLAUNCH_RUN_DIR"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoints.mkdir(exist_ok=True, parents=True)
    start, weight = newest(checkpoints) if resuming() else (0, 1.0)
    ranks = Ranks(run, rank, world)
    first = os.environ["DSLAUNCH_ATTEMPT"] == "1"
    for number in range(start + 1, steps + 1):
        time.sleep(PACE_S * (5 if fault == "slow rank" and rank == struck and number >= at else 1))
        if fault in AGAIN and number == at and rank == struck:
            strike(fault, checkpoints)
        weight -= 0.1 * weight * ranks.total(gradient(number, rank)) / world
        if rank == 0:
            with (run / "losses").open("a") as stream:
                stream.write(f"{number} {weight**2!r}\n")
        step(number)
        if first and number == at and fault not in AGAIN and (rank == struck or fault == "all ranks killed"):
            strike("rank killed" if fault == "all ranks killed" else fault, checkpoints)
        if rank == 0 and number % EVERY == 0:
            save(checkpoints, number, weight)


if __name__ == "__main__":
    main()
