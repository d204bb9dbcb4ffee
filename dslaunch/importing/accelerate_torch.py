"""accelerate's own sharding (FSDP) and none (DDP), as a recipe of engine torch.

Keys as accelerate 1.14 reads them (utils/launch.py, utils/dataclasses.py: FullyShardedDataParallelPlugin, and
parallelism_config.py).
"""

from __future__ import annotations

from typing import Any

from dslaunch.importing.accelerate_source import DEGREES, Source
from dslaunch.importing.recipe import Recipe

_FSDP = "fsdp_config."
_KEPT = {
    # key of the file: (variable, what dslaunch writes by itself)
    "fsdp_auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": ("FSDP_TRANSFORMER_CLS_TO_WRAP", ""),
    "fsdp_min_num_params": ("FSDP_MIN_NUM_PARAMS", "0"),
    "fsdp_state_dict_type": ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
    "fsdp_cpu_ram_efficient_loading": ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
}
"""What changes no plan: handed to the script in the environment, where it differs."""
_OF_FSDP1 = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)
_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", 4, 5)
_GRADIENTS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", 2, 5)


def take_ddp(recipe: Recipe, source: Source) -> dict[str, Any]:
    """One replica a GPU."""
    source.refuse_cut("tp_size", "cp_size", "sp_size")
    _torch(recipe, source, "ddp")
    return {}


def take_fsdp(recipe: Recipe, source: Source) -> dict[str, Any]:
    """States cut over all GPUs, or over a node's and replicated (HSDP); FSDP1 is planned as FSDP2."""
    version, strategy = source.whole(f"{_FSDP}fsdp_version"), source.take(f"{_FSDP}fsdp_sharding_strategy")
    reshard = source.take(f"{_FSDP}fsdp_reshard_after_forward")
    source.refuse_cut("tp_size", "cp_size", "sp_size")
    if version in (None, 1):
        source.note(f"{_FSDP}fsdp_version", "1: planned as FSDP2")
    for key in _OF_FSDP1:
        if source.take(f"{_FSDP}{key}"):
            source.note(f"{_FSDP}{key}", "FSDP1's; FSDP2 has no such setting")
    if strategy in ("NO_SHARD", 3):
        return take_ddp(recipe, source)
    if strategy in _GRADIENTS or reshard in (False, *_GRADIENTS):
        source.note(
            f"{_FSDP}fsdp_reshard_after_forward",
            "parameters stay whole between forward and backward: planned as resharded, which takes less memory",
        )
    if source.take(f"{_FSDP}fsdp_activation_checkpointing"):
        recipe.put("strategy.every.recompute", "full")
    _torch(recipe, source, _sharding(recipe, source, strategy in _HYBRID))
    _environment(recipe, source)
    return {}


def _sharding(recipe: Recipe, source: Source, hybrid: bool) -> str:
    """fsdp2, or hsdp with the number of GPUs that share one copy where the file tells it (else a node's)."""
    copies = source.whole(f"{DEGREES}dp_replicate_size") or 1
    shard = source.whole(f"{DEGREES}dp_shard_size", least=-1)
    if copies > 1 and shard and shard > 1:
        recipe.put("strategy.shard", shard)
    return "hsdp" if hybrid or copies > 1 else "fsdp2"


def _environment(recipe: Recipe, source: Source) -> None:
    for key, (name, own) in _KEPT.items():
        value = source.take(f"{_FSDP}{key}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if value not in (None, "", "none") and text != own:
            recipe.put(f"env.{name}", text)
    if source.take(f"{_FSDP}fsdp_offload_params"):
        recipe.put("env.FSDP_OFFLOAD_PARAMS", "true")
        source.note(
            f"{_FSDP}fsdp_offload_params",
            "stays on for the script; the plan counts parameters and states on the GPU, which takes more of it",
        )


def _torch(recipe: Recipe, source: Source, strategy: str) -> None:
    """accelerate under torchrun takes its settings from the environment, which engine.accelerate fills."""
    recipe.groups.setdefault("strategy", strategy)
    recipe.groups.setdefault("engine", "torch")
    recipe.put("engine.accelerate", True)
    recipe.put("training.precision", source.precision)
