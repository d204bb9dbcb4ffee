"""The process groups of every component, and what DeepSpeed asks about them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dslaunch.runtime.grid import Grid, Place
from dslaunch.runtime.tensor_parallel import Shard


@dataclass(frozen=True)
class Mesh:
    """This rank in one component: its place, and the groups that it belongs to."""

    grid: Grid
    place: Place
    shards: Any
    """Group of the ranks that hold the same stage of the same replica (tensor parallelism)."""
    replicas: Any
    """Group of the ranks that hold the same parameters (data parallelism)."""
    stage: Any
    """Group of all ranks of this pipeline stage."""

    @property
    def shard(self) -> Shard:
        return Shard(self.place.shard, self.grid.tp, self.shards)


def make_meshes(grids: dict[str, Grid], rank: int, timeout: timedelta) -> dict[str, Mesh]:
    """The meshes that `rank` is in, by component.

    Every rank of the world calls it: torch wants all ranks to make all groups in the same order.

    Args:
        timeout: of their collectives; torch gives a new group its own default, not that of the world.
    """
    meshes = {name: _make_mesh(grid, rank, timeout) for name, grid in grids.items()}
    return {name: mesh for name, mesh in meshes.items() if mesh is not None}


def _make_mesh(grid: Grid, rank: int, timeout: timedelta) -> Mesh | None:
    place = grid.place(rank)
    stages = [_group(grid.stage_ranks(stage), rank, timeout) for stage in range(grid.pp)]
    shards = [
        _group([grid.rank(stage, replica, shard) for shard in range(grid.tp)], rank, timeout)
        for stage in range(grid.pp)
        for replica in range(grid.dp)
    ]
    replicas = [
        _group([grid.rank(stage, replica, shard) for replica in range(grid.dp)], rank, timeout)
        for stage in range(grid.pp)
        for shard in range(grid.tp)
    ]
    if place is None:
        return None
    return Mesh(grid, place, _mine(shards), _mine(replicas), _mine(stages))


def _group(ranks: list[int], rank: int, timeout: timedelta) -> Any:
    made = dist.new_group(ranks, timeout=timeout)
    return made if rank in ranks else None


def _mine(groups: list[Any]) -> Any:
    return next(group for group in groups if group is not None)


@dataclass(frozen=True)
class Mpu:
    """A mesh as DeepSpeed's engine asks for it ("model parallel unit", deepspeed.initialize's `mpu`).

    The model-parallel group is the tensor-parallel one alone: an engine reduces its norm over it, and a stage
    without trainable parameters has no engine that could take part. Each stage is a model of its own to DeepSpeed.
    """

    mesh: Mesh

    def get_model_parallel_rank(self) -> int:
        return self.mesh.place.shard

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.grid.tp

    def get_model_parallel_group(self) -> Any:
        return self.mesh.shards

    def get_tensor_model_parallel_rank(self) -> int:
        return self.mesh.place.shard

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.mesh.grid.tp

    def get_tensor_model_parallel_group(self) -> Any:
        return self.mesh.shards

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.mesh.place.replica

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.grid.dp

    def get_data_parallel_group(self) -> Any:
        return self.mesh.replicas
