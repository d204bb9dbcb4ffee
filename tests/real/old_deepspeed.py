"""Runs the DeepSpeed that comes first on the path over configurations, and lists what its models take.

python -m tests.real.old_deepspeed < JOBS: a JSON list of {"config", "world", "replicas"}; "replicas" is what
DeepSpeed's batch arithmetic is to divide by. Prints {"version", "results", "keys"}: a result is empty or an error,
the keys are those of each section.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class World:
    """Stands in for deepspeed.comm where the configuration asks for ranks."""

    size = 1

    def get_rank(self, *_: Any) -> int:
        return 0

    def get_world_size(self, group: int | None = None) -> int:
        return group or self.size

    def __getattr__(self, name: str) -> Any:
        import deepspeed

        return getattr(deepspeed.comm, name)


class Mesh:
    """The mesh that deepspeed.initialize makes for Ulysses; a group is its size."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def get_group(self, mesh_dim: str) -> int:
        assert mesh_dim == "data_parallel"
        return self._replicas


def accepted(job: dict[str, Any]) -> str:
    """What DeepSpeedConfig says against a configuration; empty where it takes it."""
    import deepspeed.runtime.config as config

    config.dist = World()
    config.dist.size = job["world"]
    try:
        sequence = "sequence_parallel_size" in job["config"]
        mesh = Mesh(job["config"]["data_parallel_size"]) if sequence else None
        read = config.DeepSpeedConfig(job["config"], mesh_device=mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    batch = read.train_batch_size / read.train_micro_batch_size_per_gpu / read.gradient_accumulation_steps
    return "" if batch == job["replicas"] else f"batch of {batch} replicas"


def keys() -> dict[str, list[str]]:
    """Fields and aliases of the models that stand in each version."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        **_later(),
    }
    return {
        path: sorted({name for field, info in model.model_fields.items() for name in (field, info.alias) if name})
        for path, model in models.items()
    }


def _later() -> dict[str, Any]:
    """Models that some versions lack."""
    found: dict[str, Any] = {}
    try:
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

        found |= {"bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    except ImportError:
        pass
    try:
        from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig

        found["zero_optimization.zenflow"] = ZenFlowConfig
    except ImportError:
        pass
    return found


def main() -> None:
    jobs = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    import deepspeed

    answer = {
        "version": deepspeed.__version__.split("+")[0].strip(),
        "results": [accepted(job) for job in jobs],
        "keys": keys(),
    }
    os.write(output, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
