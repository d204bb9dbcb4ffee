"""What an engine is asked to do beside the layout, as plan.json holds it: by mode, its settings."""

from __future__ import annotations

from pydantic import BaseModel

from dslaunch.engines.deepspeed_modes import asked, hpz, only_deepspeed
from dslaunch.engines.layout import Layout
from dslaunch.planfile.plan import Setting
from dslaunch.schema.config import RunConfig
from dslaunch.schema.torch import Ddp

WITH_DISPATCHERS = ("megatron", "megatron_mimo")
"""Engines that are told how tokens travel."""
Modes = dict[str, dict[str, Setting]]


def modes(config: RunConfig, engine: str, layout: Layout) -> Modes:
    """The modes of `engine` in the trunk's layout; every engine that lacks one of them was refused before."""
    if engine == "torch":
        return _torch(config)
    if engine in WITH_DISPATCHERS:
        return {"deepep": {}} if config.strategy.dispatcher == "deepep" else {}
    if engine != "deepspeed":
        return {}
    return {**_ranks(layout), **_states(config, layout), **_files(config), **_monitors(config)}


def only_elsewhere(config: RunConfig, engine: str) -> list[str]:
    """What is asked for and `engine` would silently leave out: a sentence each."""
    found, dispatcher = only_deepspeed(config, engine), config.strategy.dispatcher
    if dispatcher != "alltoall" and engine not in WITH_DISPATCHERS:
        found.append(f"strategy.dispatcher is {dispatcher}, which is Megatron's; {engine} does not have it")
    if (parts := config.training.macro_batches) > 1 and engine != "native":
        found.append(f"training.macro_batches is {parts}, which engine native has; {engine} does not")
    return found


def _torch(config: RunConfig) -> Modes:
    found: Modes = {}
    if config.strategy.ddp != Ddp():
        found["ddp"] = _settings(config.strategy.ddp)
    if config.engine.accelerate:
        found["accelerate"] = {}
    return found


def _ranks(layout: Layout) -> Modes:
    found: Modes = {}
    if layout.tp > 1:
        found["autotp"] = {"size": layout.tp}
    if layout.cp > 1:
        found["ulysses"] = {"size": layout.cp}
    return found


def _states(config: RunConfig, layout: Layout) -> Modes:
    strategy, wanted = config.strategy, asked(config)
    found: Modes = {}
    if wanted["strategy.zero_plus_plus"]:
        found["zero_plus_plus"] = {**_settings(strategy.zero_plus_plus), "hpz": hpz(config)}
    if layout.offload.startswith("nvme"):
        found["nvme"] = _settings(strategy.nvme)
    if wanted["strategy.zenflow"]:
        found["zenflow"] = _settings(strategy.zenflow)
    if wanted["strategy.super_offload"]:
        found["super_offload"] = _settings(strategy.super_offload)
    return found


def _files(config: RunConfig) -> Modes:
    found: Modes = {}
    if config.engine.activation_checkpointing.enabled:
        found["activation_checkpointing"] = _settings(config.engine.activation_checkpointing)
    if config.checkpoint.universal:
        found["universal_checkpoint"] = {}
    if config.engine.huggingface:
        found["huggingface"] = {}
    return found


def _monitors(config: RunConfig) -> Modes:
    monitor = config.engine.monitor
    found: Modes = {}
    if monitor.tensorboard.enabled:
        found["tensorboard"] = _settings(monitor.tensorboard)
    if monitor.csv.enabled:
        found["csv_monitor"] = _settings(monitor.csv)
    if monitor.wandb.enabled:
        found["wandb"] = _settings(monitor.wandb)
    if monitor.comet.enabled:
        found["comet"] = _settings(monitor.comet)
    return found


def _settings(section: BaseModel) -> dict[str, Setting]:
    """The section's fields but the switch, and what was left open."""
    fields = section.model_dump(exclude={"enabled"}).items()
    return {key: value for key, value in fields if value not in (None, "")}
