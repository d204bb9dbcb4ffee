"""Runs rendered DeepSpeed configurations through DeepSpeed itself, in one process that stands for rank 0 of many.

python -m tests.real.rendered_deepspeed < JOBS: a JSON list of jobs, each {"config", "world", "dp", "initialize"},
and where they differ "own_groups" (DeepSpeed makes the groups itself: AutoTP, Ulysses), "model" (llama: more than
two layers) and "rates" (each layer is a parameter group with a learning rate of its own). Prints a JSON list: what
DeepSpeed made of each, or its error. Torch's fake process group stands in for the other ranks
(torch.testing._internal.distributed.fake_pg); each job has a process of its own, since DeepSpeed keeps its groups
in globals.
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
    from deepspeed.runtime.config import DeepSpeedConfig

    mesh = None if job.get("own_groups") else Mesh(job["dp"])
    read = DeepSpeedConfig(job["config"], mpu=mesh)
    found: dict[str, Any] = {
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "stage": read.zero_optimization_stage,
    }
    if job["initialize"]:
        model = tiny_llama() if job.get("model") == "llama" else two_layers()
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, model_parameters=parameters(model, job.get("rates")), config=job["config"], mpu=mesh
        )
        found["optimizer"] = type(optimizer).__name__
        found["groups"] = [engine.mp_world_size, engine.dp_world_size, engine.sequence_parallel_size]
        found["elements"] = sum(parameter.numel() for parameter in engine.module.parameters())
        found["scheduler"] = type(scheduler).__name__
        found["lrs"] = learning_rates(scheduler, job["initialize"]) if scheduler else []
    return found


def two_layers() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))


def tiny_llama() -> Any:
    """Hugging Face's Llama with the smallest sizes that 8 ranks can cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))


def parameters(model: Any, rates: list[float] | None) -> Any:
    """All of one group, or a group for each layer with a rate of its own."""
    if not rates:
        return model.parameters()
    return [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, rates, strict=True)]


def learning_rates(scheduler: Any, steps: int) -> list[list[float]]:
    """By step, the rate of each parameter group."""
    lrs = []
    for _ in range(steps):
        lrs.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.step()
    return lrs


def apart(job: dict[str, Any]) -> dict[str, Any]:
    """`judge` in a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            start(job["world"])
            found = judge(job)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with open(writing, "w") as stream:
            json.dump(found, stream)
        os._exit(0)  # the fake group has no peers to shut down with
    os.close(writing)
    with open(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text) if text else {"error": "the process died"}
    return result


def main() -> None:
    jobs = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    import deepspeed  # noqa: F401  once, for all copies

    if any(job.get("model") == "llama" for job in jobs):
        import transformers  # noqa: F401

    os.write(output, json.dumps([apart(job) for job in jobs]).encode())


if __name__ == "__main__":
    main()
