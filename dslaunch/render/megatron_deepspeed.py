"""Megatron-DeepSpeed's pretrain script for one decoder: its command line, and the DeepSpeed configuration.

Source: megatron/{arguments,training}.py, megatron/optimizer/__init__.py, megatron/model/gpt_model.py and
pretrain_gpt.py of deepspeedai/Megatron-DeepSpeed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dslaunch.engines.megatron_catalogue import megatron_deepspeed_catalogue
from dslaunch.model.params import padded_vocab
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.deepspeed import deepspeed_config, trained
from dslaunch.render.extra import merge_deepspeed
from dslaunch.render.megatron_flags import Flags, flags, merge_extra, require_known
from dslaunch.render.megatron_shared import batch_and_schedule, data, full_or_selective, sizes, whole_base
from dslaunch.render.program import RUN_DIR, checkpoint_word
from dslaunch.render.timeouts import whole_minutes
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder


def megatron_deepspeed_config(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """ds_config.json: ZeRO, batch and precision.

    The script hands its own optimizer and schedule to deepspeed.initialize, where they win over the blocks of
    the configuration, so there are none.
    """
    (component,) = plan.components.values()
    training = dataclasses.replace(plan.training, lr_schedule="constant", warmup_steps=0)
    made = deepspeed_config(
        dataclasses.replace(plan, training=training), component, trained(component), shared=True
    )
    del made["optimizer"]
    flags_of_script = _extra_flags(config)
    extra = {name: value for name, value in config.engine.extra.items() if name not in flags_of_script}
    return merge_deepspeed(made, extra, plan.engine.version)


def _extra_flags(config: RunConfig) -> dict[str, Any]:
    """What engine.extra says to the script; the rest is for DeepSpeed, whose sections hold keys of their own."""
    known = megatron_deepspeed_catalogue().arguments
    return {
        name: value
        for name, value in config.engine.extra.items()
        if f"--{name}" in known and not isinstance(value, Mapping)
    }


def megatron_deepspeed_flags(plan: Plan, config: RunConfig) -> Flags:
    """All flags, engine.extra laid over them.

    Raises:
        ConfigError: something that the script cannot express.
    """
    (name,) = plan.components
    component, decoder = plan.components[name], config.model.components[name]
    assert isinstance(decoder, Decoder), "the engine megatron_deepspeed takes a single decoder"
    made = {
        **sizes(name, decoder, plan.training.seq_len),
        **_model(name, decoder, component.tp),
        **_parallel(component, plan.training.schedule),
        **batch_and_schedule(plan, component),
        **flags(bf16=plan.training.precision == "bf16", fp16=plan.training.precision == "fp16"),
        **full_or_selective(component),
        **flags(deepspeed_activation_checkpointing=component.recompute == "full"),
        **data(plan),
        **_tokenizer(plan),
        **_checkpoints(plan),
        **flags(
            use_flash_attn_v2=plan.training.precision != "fp32" and not plan.cluster.gpu.startswith("V100"),
            distributed_timeout_minutes=whole_minutes(plan.launcher.timeout_minutes),
            log_interval=1,
        ),
        "--deepspeed": (),
        "--deepspeed_config": (f"{RUN_DIR}/ds_config.json",),
        **flags(zero_stage=component.zero),
    }
    catalogue = megatron_deepspeed_catalogue()
    require_known(made, catalogue)
    return merge_extra(made, _extra_flags(config), catalogue)


def _model(name: str, decoder: Decoder, tp: int) -> Flags:
    """The table's rows are padded to a multiple of (--make-vocab-size-divisible-by x tp): one is the table."""
    rope, base = decoder.position == "rope", "--rotary-position-embeddings-theta"
    return flags(
        num_key_value_heads=decoder.kv_heads,
        kv_channels=decoder.head_dim or decoder.hidden // decoder.heads,
        normalization=decoder.norm,
        layernorm_epsilon=decoder.norm_eps,
        disable_bias_linear=not decoder.mlp_bias,
        use_rotary_position_embeddings=rope,
        rotary_position_embeddings_theta=whole_base(name, decoder, base) if rope else None,
        no_query_key_layer_scaling=True,
        make_vocab_size_divisible_by=padded_vocab(decoder, tp),
    )


def _parallel(component: ComponentPlan, schedule: str) -> Flags:
    """Without pipeline stages the script's ordinary model runs, which takes every ZeRO stage.

    The optimizer is made by the script: DeepSpeed's on the GPU, or on the CPU where its states are there.
    """
    made = flags(
        tensor_model_parallel_size=component.tp,
        pipeline_model_parallel_size=component.pp,
        no_pipeline_parallel=component.pp == 1,
        enable_zbh1_pipeline=component.pp > 1 and schedule == "zb-h1",
        cpu_optimizer=component.offload != "none",
    )
    return made if component.offload != "none" else {**made, "--ds_fused_adam": ()}


def _tokenizer(plan: Plan) -> Flags:
    if not plan.files.tokenizer:
        return {}
    sentencepiece = plan.files.tokenizer.endswith(".model")
    kind = "GPTSentencePieceTokenizer" if sentencepiece else "HFTokenizer"
    return flags(tokenizer_type=kind, tokenizer_model=plan.files.tokenizer)


def _checkpoints(plan: Plan) -> Flags:
    """--finetune loads weights alone, and starts at step 0."""
    files = plan.files
    weights_only = bool(files.weights) and not files.checkpoint_load
    return {
        "--save": (checkpoint_word(plan),),
        **flags(
            save_interval=files.checkpoint_every or plan.training.steps,
            load=files.checkpoint_load or files.weights or None,
            finetune=weights_only,
            exit_signal_handler=True,
        ),
    }
