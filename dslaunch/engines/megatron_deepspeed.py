"""Megatron-DeepSpeed's pretrain script: tensor and pipeline parallelism, ZeRO underneath."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dslaunch.engines import deepspeed, megatron
from dslaunch.engines.layout import Layout
from dslaunch.engines.megatron_limits import unflagged
from dslaunch.engines.versions import NO_MEM_STATUS, executing, orders
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder

_ZB_H1, _EXACT = "zb-h1", "enable-zbh1-exact-semantics"


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """All of the model trains. Its pipeline counts layers and cuts them evenly; no flag says otherwise.

    Source: deepspeedai/Megatron-DeepSpeed:megatron/model/gpt_model.py (partition_method type:transformer).
    """
    uneven = [
        f"strategy.{name}.layers_per_stage is {list(layout.layers_per_stage)}; megatron_deepspeed cuts the layers "
        "evenly, and no flag says otherwise"
        for name, layout in layouts.items()
        if len(set(layout.layers_per_stage)) > 1
    ]
    return [
        *megatron.trains(config, ("all",)), *uneven, *_unflagged(config, layouts),
        *_split_backward(config, layouts),
    ]  # fmt: skip


def _split_backward(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What the zero-bubble pipeline does not go with, and what goes with nothing else.

    Source: deepspeedai/Megatron-DeepSpeed:megatron/arguments.py validate_args, at 4efb479 (2025-07).
    """
    pipelined = any(layout.pp > 1 for layout in layouts.values())
    if not (pipelined and config.training.schedule == _ZB_H1):
        if not config.engine.extra.get(_EXACT):
            return []
        return [f"engine.extra.{_EXACT} is for training.schedule=zb-h1 in a pipeline; leave it out"]
    faults = []
    if _ZB_H1 not in orders(ENGINE, config.engine.version):
        faults.append(
            "training.schedule is zb-h1: Megatron-DeepSpeed's zero-bubble pipeline calls "
            f"PipelineEngine.mem_status, which DeepSpeed has no more from {NO_MEM_STATUS} on, and every rank ends "
            "with an AttributeError in its first step; leave training.schedule out, or set "
            f"engine.version={executing(ENGINE, _ZB_H1)} and install it"
        )
    if config.engine.extra.get("sequence-parallel"):
        faults.append(
            "training.schedule is zb-h1, and engine.extra.sequence-parallel is set: Megatron-DeepSpeed refuses "
            "the two together; leave one of them out"
        )
    return faults


def _unflagged(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What the script's model has no flags for."""
    faults = []
    for name, layout in layouts.items():
        decoder, key = config.model.components[name], f"model.components.{name}"
        if not isinstance(decoder, Decoder):
            continue
        lacking = {
            "experts": decoder.experts is not None,
            "mla": decoder.mla is not None,
            "qk_norm": decoder.qk_norm,
            "window": decoder.window is not None,
            "mtp_layers": decoder.mtp_layers > 0,
        }
        faults += [
            f"{key}.{option}: Megatron-DeepSpeed's pretrain script has no flags for it"
            for option, there in lacking.items()
            if there
        ]
        faults += unflagged(name, decoder)
        if len({decoder.qkv_bias, decoder.out_bias, decoder.mlp_bias}) > 1:
            faults.append(
                f"{key}: qkv_bias {decoder.qkv_bias}, out_bias {decoder.out_bias}, mlp_bias {decoder.mlp_bias}: "
                "Megatron-DeepSpeed has a bias on all linear layers, or on none"
            )
        if decoder.kv_heads % layout.tp:
            faults.append(
                f"strategy.{name}.tp is {layout.tp}: Megatron-DeepSpeed cuts key/value heads, and {key}.kv_heads "
                f"{decoder.kv_heads} / tp {layout.tp} is not whole"
            )
    return faults


ENGINE = dataclasses.replace(
    deepspeed.ENGINE,
    name="megatron_deepspeed",
    program="Megatron-DeepSpeed's pretrain_gpt.py (engine.path)",
    single_decoder=True,
    degrees=frozenset({"tp", "pp"}),
    zero_with_pipeline=frozenset({0, 1}),
    offload=frozenset({"none", "cpu"}),
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    schedules=frozenset({"1f1b", _ZB_H1}),
    ended={_ZB_H1: NO_MEM_STATUS},
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: ZeRO-2 and ZeRO-3 are incompatible with pipelines",
    limits=limits,
)
