"""engine.extra: what a framework takes and dslaunch does not model, checked against the framework's keys."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from dslaunch.engines.catalogue import Argument, megatron_arguments
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

MEGATRON_DECIDED = {
    "--tensor-model-parallel-size": "strategy.COMPONENT.tp",
    "--pipeline-model-parallel-size": "strategy.COMPONENT.pp",
    "--num-virtual-stages-per-pipeline-rank": "strategy.COMPONENT.vpp",
    "--num-layers-per-virtual-pipeline-stage": "strategy.COMPONENT.vpp",
    "--pipeline-model-parallel-layout": "strategy.COMPONENT.layers_per_stage",
    "--decoder-first-pipeline-num-layers": "strategy.COMPONENT.layers_per_stage",
    "--decoder-last-pipeline-num-layers": "strategy.COMPONENT.layers_per_stage",
    "--context-parallel-size": "strategy.COMPONENT.cp",
    "--expert-model-parallel-size": "strategy.COMPONENT.ep",
    "--use-distributed-optimizer": "strategy.COMPONENT.zero",
    "--sequence-parallel": "training.sequence_parallel",
    "--micro-batch-size": "training.micro_batch",
    "--global-batch-size": "training.global_batch",
    "--seq-length": "training.seq_len",
    "--bf16": "training.precision",
    "--fp16": "training.precision",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
    "--clip-grad": "training.clip",
    "--lr": "training.optimizer.lr",
    "--min-lr": "training.optimizer.min_lr",
    "--lr-decay-style": "training.optimizer.schedule",
    "--lr-warmup-iters": "training.optimizer.warmup_steps",
    "--weight-decay": "training.optimizer.weight_decay",
    "--recompute-granularity": "strategy.COMPONENT.recompute",
    "--recompute-activations": "strategy.COMPONENT.recompute",
    "--num-layers": "model.components.COMPONENT.layers",
    "--hidden-size": "model.components.COMPONENT.hidden",
    "--ffn-hidden-size": "model.components.COMPONENT.ffn",
    "--num-attention-heads": "model.components.COMPONENT.heads",
    "--num-query-groups": "model.components.COMPONENT.kv_heads",
    "--padded-vocab-size": "model.components.COMPONENT.vocab",
    "--data-path": "data.path",
    "--save": "checkpoint.dir",
    "--save-interval": "checkpoint.every",
    "--load": "checkpoint.load",
    "--distributed-timeout-minutes": "launcher.timeout_minutes",
}
"""Megatron's flags that the plan decides, and the key of dslaunch that sets each."""

_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


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


def merge_megatron(
    flags: Mapping[str, tuple[str, ...]], extra: Mapping[str, Any], version: str
) -> dict[str, tuple[str, ...]]:
    """`flags` (flag -> its values as shell words) with `extra` (flag without dashes -> value) laid over it.

    Raises:
        ConfigError: a flag that Megatron does not know, a value that it would refuse, or a flag that the plan
            decides.
    """
    known = megatron_arguments(version)
    merged = dict(flags)
    for name, value in extra.items():
        flag = f"--{name}"
        if decider := MEGATRON_DECIDED.get(flag):
            raise ConfigError(f"engine.extra.{name}: the plan decides this flag. Set {decider} instead")
        if flag not in known:
            names = [each.removeprefix("--") for each in known]
            raise ConfigError(
                f"engine.extra.{name}: Megatron-LM core {version} has no flag {flag}; its parser would stop."
                f"{nearest(name, names)} Write a flag without its leading dashes, such as "
                "engine.extra.log-params-norm=true"
            )
        merged[flag] = tuple(shlex.quote(text) for text in _values(name, value, known[flag]))
    return merged


def _values(name: str, value: Any, argument: Argument) -> list[str]:
    if argument.nargs == "0":
        if value is not True:
            raise ConfigError(
                f"engine.extra.{name} is {value!r}: the flag takes no value. Write true, or leave the key out"
            )
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    exact = {"": 1, "*": None, "+": None}.get(argument.nargs, argument.nargs)
    if exact is not None and len(values) != int(exact):
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: Megatron takes {exact} value(s) here, not {len(values)}"
        )
    for each in values:
        _check_value(name, each, argument)
    return [str(each) for each in values]


def _check_value(name: str, value: Any, argument: Argument) -> None:
    numbers = _NUMBERS.get(argument.type)
    if numbers and type(value) not in numbers:
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: Megatron takes a number of type {argument.type}"
        )
    if argument.choices and value not in argument.choices:
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: allowed are {listed(argument.choices)}."
            f"{nearest(str(value), map(str, argument.choices))}"
        )
    if isinstance(value, bool | dict) or value is None or "\n" in str(value):
        raise ConfigError(f"engine.extra.{name} is {value!r}: one line of text or a number is expected")
