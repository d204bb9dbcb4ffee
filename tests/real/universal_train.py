"""A training script of a user's own on DeepSpeed, whose loss does not depend on how many ranks there are.

    universal_train.py STEPS

A small model with layers that no rank count divides; the ranks share out the samples of the global batch. Every
second step is saved, by DeepSpeed alone. A file `slow` in the run folder makes a step take a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

EVERY = 2
_WIDTH = 13


def model(folder: str) -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(_WIDTH, 31), torch.nn.Tanh(), torch.nn.LayerNorm(31), torch.nn.Linear(31, 5)]
    return torch.nn.Sequential(*layers)


def samples(step: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(batch, _WIDTH, generator=draw)
    return inputs, torch.stack([inputs[:, each : each + 4].prod(1) for each in range(5)], 1)


def main() -> None:
    from dslaunch.progress import resuming, step, watch

    watch()
    steps, run = int(sys.argv[1]), Path(os.environ["DSLAUNCH_RUN_DIR"])
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = model(str(run))
    engine, *_ = deepspeed.initialize(
        model=made, model_parameters=made.parameters(), config=os.environ["DSLAUNCH_DS_CONFIG"]
    )
    batch, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    checkpoints = run / "checkpoints"
    start = 0
    if resuming():
        path, state = engine.load_checkpoint(str(checkpoints))
        start = state["done"] if path else 0
    for number in range(start + 1, steps + 1):
        time.sleep(1.0 if (run / "slow").exists() else 0.1)
        inputs, wanted = samples(number, batch)
        total = 0.0
        for part in range(engine.gradient_accumulation_steps()):
            first = (part * world + rank) * micro
            found = engine(inputs[first : first + micro])
            loss = torch.nn.functional.mse_loss(found, wanted[first : first + micro])
            engine.backward(loss)
            engine.step()
            total += float(loss) / engine.gradient_accumulation_steps()
        mean = torch.tensor(total, dtype=torch.float64)
        torch.distributed.all_reduce(mean)
        if rank == 0:
            with (run / "losses").open("a") as stream:
                stream.write(f"{number} {float(mean) / world!r} {world}\n")
        step(number)
        if number % EVERY == 0:
            engine.save_checkpoint(str(checkpoints), client_state={"done": number})
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps({"done": steps}))


if __name__ == "__main__":
    main()
