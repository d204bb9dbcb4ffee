"""What DeepSpeed does beside its ZeRO stages: offload, ZeRO++, ZenFlow, SuperOffload, as the strategy's keys."""

from __future__ import annotations

from typing import Any

from dslaunch.importing.deepspeed_source import Source
from dslaunch.importing.recipe import Recipe

_ZERO = "zero_optimization."
_OWN_KEYS = {
    f"{_ZERO}zero_hpz_partition_size": "strategy.zero_plus_plus.hpz",
    f"{_ZERO}zero_quantized_weights": "strategy.zero_plus_plus.quantized_weights",
    f"{_ZERO}zero_quantized_gradients": "strategy.zero_plus_plus.quantized_gradients",
    f"{_ZERO}offload_optimizer.super_offload": "strategy.super_offload.enabled",
    f"{_ZERO}offload_optimizer.cpuadam_cores_perc": "strategy.super_offload.cpu_cores",
    f"{_ZERO}zenflow.topk_ratio": "strategy.zenflow.topk_ratio",
    f"{_ZERO}zenflow.select_interval": "strategy.zenflow.select_interval",
    f"{_ZERO}zenflow.update_interval": "strategy.zenflow.update_interval",
    f"{_ZERO}zenflow.full_warm_up_rounds": "strategy.zenflow.warmup_steps",
    f"{_ZERO}zenflow.overlap_step": "strategy.zenflow.overlap_step",
    "checkpoint.load_universal": "checkpoint.universal",
}
_AIO = {
    "aio.block_size": "strategy.nvme.block_size",
    "aio.queue_depth": "strategy.nvme.queue_depth",
    "aio.intra_op_parallelism": "strategy.nvme.threads",
    "aio.single_submit": "strategy.nvme.single_submit",
    "aio.overlap_events": "strategy.nvme.overlap_events",
}
"""Read by DeepSpeed where something goes to NVMe."""


def take_modes(recipe: Recipe, source: Source) -> None:
    """Fills strategy.every.offload and the sections beside it."""
    zenflow = bool(source.under(f"{_ZERO}zenflow"))
    offload = _offload(source)
    if offload:
        recipe.put("strategy.every.offload", offload)
    own = _OWN_KEYS
    if offload.startswith("nvme"):
        own = own | _AIO
        paths = [
            source.take(f"{_ZERO}{section}.nvme_path") for section in ("offload_optimizer", "offload_param")
        ]
        recipe.put("strategy.nvme.path", next((path for path in paths if path), ""))
    for key, target in own.items():
        value: Any = source.take(key)
        if value is not None:
            recipe.put(target, value)
    if zenflow:
        recipe.put("strategy.zenflow.enabled", True)
        if (chosen := source.take(f"{_ZERO}zenflow.select_strategy")) not in (None, "step"):
            source.note(f"{_ZERO}zenflow.select_strategy", f"{chosen}: step is written")


def _offload(source: Source) -> str:
    """strategy.COMPONENT.offload; empty where nothing is moved."""
    parameters = source.take(f"{_ZERO}offload_param.device")
    states = source.take(f"{_ZERO}offload_optimizer.device")
    if source.take(f"{_ZERO}cpu_offload"):
        states = "cpu"
        source.note(f"{_ZERO}cpu_offload", "deprecated: offload_optimizer.device is written")
    parameters, states = (None if device == "none" else device for device in (parameters, states))
    if parameters and states != parameters:
        source.note(
            f"{_ZERO}offload_optimizer.device", f"{states}: parameters and states go to {parameters} together"
        )
    device = parameters or states
    return "" if device is None else f"{device}_params" if parameters else str(device)
