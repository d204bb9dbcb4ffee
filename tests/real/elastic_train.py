"""A stand-in for training whose loss does not depend on how many ranks there are: `elastic_train.py STEPS`.

Each step the ranks share out the samples of the global batch, add up over TCP, and move one weight by the mean.
Rank 0 saves every second step. A file `slow` in the run folder makes a step take a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.real.chaos_train import EVERY, Ranks, gradient, newest, save

PACE_S = 0.1


def share(step: int, rank: int, world: int, batch: int) -> float:
    """What `rank` brings to `step`."""
    return sum(gradient(step, sample) for sample in range(rank, batch, world))


def curve(steps: int, batch: int) -> list[float]:
    """The losses of an uninterrupted run."""
    weight, losses = 1.0, []
    for step in range(1, steps + 1):
        weight -= 0.1 * weight * share(step, 0, 1, batch) / batch
        losses.append(weight**2)
    return losses


def main() -> None:
    from dslaunch.progress import resuming, step, watch

    watch()
    steps, run = int(sys.argv[1]), Path(os.environ["DSLAUNCH_RUN_DIR"])
    batch = json.loads((run / "plan.json").read_text())["global_batch"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    start, weight = newest(checkpoints) if resuming() else (0, 1.0)
    ranks = Ranks(run, rank, world)
    for number in range(start + 1, steps + 1):
        time.sleep(1.0 if (run / "slow").exists() else PACE_S)
        weight -= 0.1 * weight * ranks.total(share(number, rank, world, batch)) / batch
        if rank == 0:
            with (run / "losses").open("a") as stream:
                stream.write(f"{number} {weight**2!r} {world}\n")
        step(number)
        if rank == 0 and number % EVERY == 0:
            save(checkpoints, number, weight)


if __name__ == "__main__":
    main()
