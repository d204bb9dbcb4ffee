"""Who shards the states where nobody says so: DDP, FSDP2 and HSDP of engine torch are tried in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslaunch.engines.base import Engine
from dslaunch.engines.torch import STAGES
from dslaunch.model.shapes import divisors
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

Wanted = Mapping[str, ComponentStrategy]


def variants(config: RunConfig, engine: Engine, pinned: Wanted) -> Iterator[tuple[RunConfig, Wanted]]:
    """(configuration, strategies) under each sharding of the engine; as they are where none is left to choose."""
    strategy = config.strategy
    if "sharding" in strategy.model_fields_set or strategy.sharding in engine.shardings:
        yield config, pinned
        return
    for sharding, stage in STAGES.items():
        staged = {
            name: want if want.zero is not None else want.model_copy(update={"zero": stage})
            for name, want in pinned.items()
        }
        for shard in _shards(config, sharding):
            yield sharded(config, sharding, shard), staged


def sharded(config: RunConfig, sharding: str, shard: int | None) -> RunConfig:
    """The configuration with this sharding, over `shard` ranks under hsdp."""
    if sharding == config.strategy.sharding:
        return config
    strategy = config.strategy.model_copy(update={"sharding": sharding, "shard": shard})
    return config.model_copy(update={"strategy": strategy})


def _shards(config: RunConfig, sharding: str) -> list[int | None]:
    """Ranks that share one copy of the states: under hsdp as pinned, or any number but one and all."""
    pinned, world = config.strategy.shard, config.cluster.world_size
    if sharding != "hsdp" or pinned is not None:
        return [pinned]
    return [size for size in divisors(world) if 1 < size < world]
