"""What the caller knows beside the files: versions and topology. What is None is not known, and not guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan

NEWEST_DEEPSPEED = "0.19.8"
"""The version whose parser the rules were run against."""


@dataclass(frozen=True)
class Settings:
    """Options of `dslaunch check`."""

    deepspeed_version: str = NEWEST_DEEPSPEED
    megatron_version: str = ""
    """Of megatron-core, or empty where it isn't known."""
    world_size: int | None = None
    """Ranks in all."""
    nodes: int | None = None
    ranks_per_node: int | None = None
    tp: int | None = None
    """Tensor-parallel size that the program's own mesh uses."""
    pp: int | None = None
    """Pipeline stages."""
    size_from: str = ""
    """Who says how many ranks and nodes there are; empty where nobody does."""
    huggingface: bool | None = None
    """Whether Hugging Face Trainer or accelerate reads the DeepSpeed JSON, and fills in `auto`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(\.\d+)*", self.deepspeed_version):
            found = f"DeepSpeed version {self.deepspeed_version!r}"
            raise ConfigError(f"{found}: expected numbers and dots, as in {NEWEST_DEEPSPEED}.")
        if not re.fullmatch(r"(\d+(\.\d+)*)?", self.megatron_version):
            found = f"Megatron version {self.megatron_version!r}"
            raise ConfigError(f"{found}: expected megatron-core's, numbers and dots, as in 0.16.1.")
        for name in ("world_size", "nodes", "ranks_per_node", "tp", "pp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: at least 1 is needed.")

    @property
    def data_parallel(self) -> int | None:
        """Replicas: world_size / (tp * pp); None where it isn't known or not whole."""
        model_parallel = (self.tp or 1) * (self.pp or 1)
        if self.world_size is None or self.world_size % model_parallel:
            return None
        return self.world_size // model_parallel


def of_plan(plan: Plan) -> Settings:
    """The settings that a plan decides. A rendered DeepSpeed JSON never relies on `auto`."""
    reads_deepspeed = plan.engine.name in ("deepspeed", "megatron_deepspeed", "native")
    version = plan.engine.version if reads_deepspeed else NEWEST_DEEPSPEED
    megatron = plan.engine.version if plan.engine.name in ("megatron", "megatron_mimo") else ""
    return Settings(
        deepspeed_version=version,
        megatron_version=megatron,
        world_size=plan.world_size,
        nodes=plan.cluster.nodes,
        ranks_per_node=plan.cluster.gpus_per_node,
        huggingface=False,
    )
