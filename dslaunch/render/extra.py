"""engine.extra: what a framework takes and dslaunch does not model, checked against the framework's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.engines.deepspeed_keys import Key, Section, rejects_unknown, table
from dslaunch.errors import ConfigError, listed, nearest

DEEPSPEED_DECIDED = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.num_microbatches",
    "gradient_clipping": "training.clip",
    "bf16.enabled": "training.precision",
    "bfloat16": "training.precision",
    "fp16.enabled": "training.precision",
    "data_types.grad_accum_dtype": "training.grad_accum_dtype",
    "zero_optimization.stage": "strategy.COMPONENT.zero",
    "zero_optimization.overlap_comm": "training.overlap_comm",
    "zero_optimization.offload_optimizer.device": "strategy.COMPONENT.offload",
    "zero_optimization.offload_param.device": "strategy.COMPONENT.offload",
    "optimizer.type": "training.optimizer.name",
    "optimizer.params.lr": "training.optimizer.lr",
    "optimizer.params.betas": "training.optimizer.betas",
    "optimizer.params.eps": "training.optimizer.eps",
    "optimizer.params.weight_decay": "training.optimizer.weight_decay",
    "scheduler": "training.optimizer.schedule",
    "zero_optimization.zero_hpz_partition_size": "strategy.zero_plus_plus.hpz",
    "zero_optimization.zero_quantized_weights": "strategy.zero_plus_plus.quantized_weights",
    "zero_optimization.zero_quantized_gradients": "strategy.zero_plus_plus.quantized_gradients",
    "zero_optimization.zenflow": "strategy.zenflow",
    "zero_optimization.offload_optimizer.super_offload": "strategy.super_offload.enabled",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "strategy.super_offload.cpu_cores",
    "zero_optimization.offload_optimizer.nvme_path": "strategy.nvme.path",
    "zero_optimization.offload_param.nvme_path": "strategy.nvme.path",
    "checkpoint.load_universal": "checkpoint.universal",
    "tensor_parallel.autotp_size": "strategy.COMPONENT.tp",
    "tensor_parallel.tp": "strategy.COMPONENT.tp",
    "sequence_parallel_size": "strategy.COMPONENT.cp",
    "data_parallel_size": "strategy.COMPONENT.dp",
}
"""DeepSpeed's keys that the plan decides, and the key of dslaunch that sets each."""


def merge_deepspeed(config: Mapping[str, Any], extra: Mapping[str, Any], version: str) -> dict[str, Any]:
    """`config` with `extra` laid over it, section by section, for DeepSpeed `version`.

    Raises:
        ConfigError: a key that this DeepSpeed does not know or has removed, or one that the plan decides.
    """
    return _merge_section(config, extra, table().sections[""], "", version)


def _merge_section(
    config: Mapping[str, Any], extra: Mapping[str, Any], section: Section, path: str, version: str
) -> dict[str, Any]:
    merged = dict(config)
    for name, value in extra.items():
        dotted = f"{path}{name}"
        _refuse_decided(dotted)
        key = _known(section, name, dotted, version)
        own = _written_as(section, key, merged)
        if key.type == "section":
            below = table().sections[section.below(key)]
            given = _object(dotted, value, below)
            merged[own] = _merge_section(merged.get(own, {}), given, below, f"{dotted}.", version)
        elif key.type == "dict" and isinstance(value, Mapping):
            for inner in value:
                _refuse_decided(f"{dotted}.{inner}")
            merged[own] = {**merged.get(own, {}), **value}
        else:
            merged[own] = value
    return merged


def _object(dotted: str, value: Any, section: Section) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"engine.extra.{dotted} is {value!r}: a section with keys of its own is expected; "
            f"allowed are {listed(section.keys)}"
        )
    return value


def _refuse_decided(dotted: str) -> None:
    if decider := DEEPSPEED_DECIDED.get(dotted):
        raise ConfigError(f"engine.extra.{dotted}: the plan decides this key. Set {decider} instead")


def _written_as(section: Section, key: Key, config: Mapping[str, Any]) -> str:
    """The name under which the setting stands in `config`, where it does under another of its names."""
    twins = [key.alias_of, *(name for name, other in section.keys.items() if other.alias_of == key.name)]
    return next((name for name in twins if name in config), key.name)


def _known(section: Section, name: str, dotted: str, version: str) -> Key:
    found = section.keys.get(name)
    if found is None:
        fate = "reject" if rejects_unknown(section, version) else "silently ignore"
        valid = [each for each, key in section.keys.items() if not key.gone(version) and not key.lacks(version)]
        raise ConfigError(
            f"engine.extra.{dotted}: DeepSpeed {version} has no such key, and would {fate} it. "
            f"Allowed beside it are {listed(sorted(valid))}.{nearest(name, valid)}"
        )
    if found.gone(version):
        instead = f"Use {found.moved_to} instead" if found.moved_to else "Take it out"
        raise ConfigError(
            f"engine.extra.{dotted}: removed in DeepSpeed {found.removed}, and {version} (engine.version) stops "
            f"where it stands. {instead}, or set engine.version={found.until}"
        )
    if found.lacks(version):
        raise ConfigError(
            f"engine.extra.{dotted}: came with DeepSpeed {found.since}; engine.version is {version}. Set "
            f"engine.version={found.since} or newer, or take it out"
        )
    return found
