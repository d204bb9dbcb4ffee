"""Megatron-DeepSpeed's pretrain script: tensor and pipeline parallelism, ZeRO underneath."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dslaunch.engines import deepspeed, megatron
from dslaunch.engines.layout import Layout
from dslaunch.engines.megatron_limits import unflagged
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder


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
    return [*megatron.trains(config, ("all",)), *uneven, *_unflagged(config, layouts)]


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
    schedules=frozenset({"1f1b", "zb-h1"}),
    source="deepspeed/runtime/pipe/engine.py, 0.19.8: ZeRO-2 and ZeRO-3 are incompatible with pipelines",
    limits=limits,
)
