"""Runs rendered DeepSpeed configurations through DeepSpeed itself, in one process that stands for rank 0 of many.

python -m tests.real.rendered_deepspeed < JOBS: a JSON list of jobs, each {"config", "world", "dp", "initialize"}.
Prints a JSON list: what DeepSpeed made of each, or its error. Torch's fake process group stands in for the
other ranks (torch.testing._internal.distributed.fake_pg).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Mesh:
    """The mpu of a component: rank 0 of `dp` replicas, dense over the first ranks of the world."""

    def __init__(self, dp: int) -> None:
        import torch.distributed as dist

        self._dp = dp
        self._groups = {"data": dist.new_group(list(range(dp))), "model": dist.new_group([0])}

    def get_data_parallel_world_size(self) -> int:
        return self._dp

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return self._groups["data"]

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return self._groups["model"]


def start(world: int) -> None:
    """Join a world of `world` ranks, of which this process is the only one that lives."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    import deepspeed

    # Leaves out a shared-memory operator that would be compiled first.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="fake")


def judge(job: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed makes of one job."""
    import deepspeed
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    mesh = Mesh(job["dp"])
    read = DeepSpeedConfig(job["config"], mpu=mesh)
    found: dict[str, Any] = {
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "stage": read.zero_optimization_stage,
    }
    if job["initialize"]:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        _, optimizer, _, scheduler = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=job["config"], mpu=mesh
        )
        found["optimizer"] = type(optimizer).__name__
        found["scheduler"] = type(scheduler).__name__
        found["lrs"] = _learning_rates(scheduler, job["initialize"]) if scheduler else []
    return found


def _learning_rates(scheduler: Any, steps: int) -> list[float]:
    lrs = []
    for _ in range(steps):
        lrs.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step()
    return lrs


def main() -> None:
    jobs = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    start(jobs[0]["world"])
    results = []
    for job in jobs:
        try:
            results.append(judge(job))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    os.write(output, json.dumps(results).encode())
    os._exit(0)  # the fake group has no peers to shut down with


if __name__ == "__main__":
    main()
