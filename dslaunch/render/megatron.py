"""The command line of Megatron-LM's pretrain script for one decoder: flag -> its values as shell words.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM at core_v0.16.0 (parser and validate_args).
"""

from __future__ import annotations

import shlex

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.program import checkpoint_word
from dslaunch.render.timeouts import whole_minutes
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder

Flags = dict[str, tuple[str, ...]]


def megatron_flags(plan: Plan, config: RunConfig) -> Flags:
    """All flags, in the order in which a reader looks for them; engine.extra is not among them yet.

    Raises:
        ConfigError: something that Megatron's parser or model cannot express.
    """
    (name,) = plan.components
    component, decoder = plan.components[name], config.model.components[name]
    assert isinstance(decoder, Decoder), "the engine megatron takes a single decoder"
    return {
        **_model(name, decoder, plan.training.seq_len),
        **_vocabulary(name, decoder, component.tp),
        **_parallel(plan, component),
        **_batch_and_schedule(plan, component),
        **_precision(plan),
        **_recompute(component),
        **_data(plan, config),
        **_checkpoints(plan),
        "--transformer-impl": ("transformer_engine",),
        "--attention-backend": (_attention(plan),),
        "--distributed-timeout-minutes": (str(whole_minutes(plan.launcher.timeout_minutes)),),
        "--log-interval": ("1",),
        "--log-throughput": (),
    }


def _flags(**values: object) -> Flags:
    """Keyword arguments as flags: True is a flag alone, False and None are left out."""
    named = {f"--{key.replace('_', '-')}": value for key, value in values.items()}
    return {
        flag: () if value is True else (shlex.quote(_text(value)),)
        for flag, value in named.items()
        if value is not None and value is not False
    }


def _text(value: object) -> str:
    text = str(value)
    if "\n" in text:
        raise ConfigError(f"{text!r}: a value of megatron_args.txt is one line of text; take the newline out")
    return text


def _model(name: str, decoder: Decoder, seq_len: int) -> Flags:
    if seq_len > decoder.max_positions:
        raise ConfigError(
            f"training.seq_len is {seq_len}, but model.components.{name}.max_positions is "
            f"{decoder.max_positions}: Megatron stops there. Shorten the sequence, or raise max_positions"
        )
    if decoder.position == "rope" and decoder.rope_theta != int(decoder.rope_theta):
        raise ConfigError(
            f"model.components.{name}.rope_theta is {decoder.rope_theta}: Megatron's --rotary-base takes whole "
            "numbers only. Round it yourself, or take another engine"
        )
    rope = decoder.position == "rope"
    return _flags(
        num_layers=decoder.layers,
        hidden_size=decoder.hidden,
        ffn_hidden_size=decoder.ffn,
        num_attention_heads=decoder.heads,
        group_query_attention=decoder.kv_heads != decoder.heads,
        num_query_groups=decoder.kv_heads if decoder.kv_heads != decoder.heads else None,
        kv_channels=decoder.head_dim or decoder.hidden // decoder.heads,
        swiglu=decoder.gated_mlp,
        normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[decoder.norm],
        norm_epsilon=decoder.norm_eps,
        untie_embeddings_and_output_weights=not decoder.tied_embeddings,
        position_embedding_type="rope" if rope else "learned_absolute",
        rotary_base=int(decoder.rope_theta) if rope else None,
        seq_length=seq_len,
        max_position_embeddings=decoder.max_positions,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **_biases(name, decoder),
    )


def _biases(name: str, decoder: Decoder) -> dict[str, bool]:
    """Megatron's linear layers have a bias all together, or none but the query, key and value projection."""
    others = {decoder.out_bias, decoder.mlp_bias}
    if others == {False}:
        return {"disable_bias_linear": True, "add_qkv_bias": decoder.qkv_bias}
    if others == {True} and decoder.qkv_bias:
        return {}
    raise ConfigError(
        f"model.components.{name}: qkv_bias {decoder.qkv_bias}, out_bias {decoder.out_bias}, mlp_bias "
        f"{decoder.mlp_bias}: Megatron has a bias on all linear layers, on none, or on qkv alone"
    )


def _vocabulary(name: str, decoder: Decoder, tp: int) -> Flags:
    """The table has the model's rows exactly, whatever the tokenizer would be padded to."""
    if decoder.vocab % tp:
        raise ConfigError(
            f"model.components.{name}.vocab is {decoder.vocab} = {decoder.vocab // tp} x {tp} + "
            f"{decoder.vocab % tp}: Megatron cuts the embedding table over tp {tp}. Pad the vocabulary to a "
            f"multiple of {tp}, or take another tp"
        )
    return _flags(padded_vocab_size=decoder.vocab)


def _parallel(plan: Plan, component: ComponentPlan) -> Flags:
    overlap = plan.training.overlap_comm and component.dp * component.cp > 1
    return _flags(
        tensor_model_parallel_size=component.tp,
        pipeline_model_parallel_size=component.pp,
        num_virtual_stages_per_pipeline_rank=component.vpp if component.vpp > 1 else None,
        **_stage_layers(component),
        context_parallel_size=component.cp,
        sequence_parallel=component.tp > 1 and plan.training.sequence_parallel,
        use_distributed_optimizer=component.zero == 1,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and component.zero == 1,
    )


def _stage_layers(component: ComponentPlan) -> dict[str, int]:
    """Flags for a first or last stage that differs from the others.

    Raises:
        ConfigError: stages in between differ, or a stage does not split into its virtual stages.
    """
    layers = component.layers_per_stage
    if any(count % component.vpp for count in layers):
        raise ConfigError(
            f"layers_per_stage is {list(layers)}: Megatron cuts each stage into vpp {component.vpp} equal "
            "parts. Choose counts that are multiples of vpp"
        )
    if len(set(layers)) == 1:
        return {}
    if len(set(layers[1:-1])) > 1:
        raise ConfigError(
            f"layers_per_stage is {list(layers)}: Megatron lets the first and the last stage differ, "
            "and the others must be equal. Choose such counts"
        )
    return {"decoder_first_pipeline_num_layers": layers[0], "decoder_last_pipeline_num_layers": layers[-1]}


def _batch_and_schedule(plan: Plan, component: ComponentPlan) -> Flags:
    training = plan.training
    if training.warmup_steps >= training.steps:
        raise ConfigError(
            f"training.optimizer.warmup_steps is {training.warmup_steps}, training.steps {training.steps}: "
            "Megatron needs a step after the warm-up. Shorten the warm-up"
        )
    return _flags(
        micro_batch_size=component.micro_batch,
        global_batch_size=plan.global_batch,
        train_iters=training.steps,
        optimizer="adam",
        lr=component.lr,
        min_lr=training.min_lr,
        lr_decay_style=training.lr_schedule,
        lr_decay_iters=training.steps,
        lr_warmup_iters=training.warmup_steps,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_eps=training.eps,
        weight_decay=component.weight_decay,
        clip_grad=training.clip,
        seed=training.seed,
        eval_iters=0,
        eval_interval=training.steps,
    )


def _precision(plan: Plan) -> Flags:
    """fp32 accumulation is written out; bf16 gradients are reduced in bf16 only where the plan says so."""
    half, accum = plan.training.precision, plan.training.grad_accum_dtype
    return _flags(
        bf16=half == "bf16",
        fp16=half == "fp16",
        accumulate_allreduce_grads_in_fp32=half != "fp32" and accum == "fp32",
        grad_reduce_in_bf16=half == accum == "bf16",
    )


def _recompute(component: ComponentPlan) -> Flags:
    if component.recompute == "full":
        return _flags(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return _flags(recompute_activations=component.recompute == "selective")


def _data(plan: Plan, config: RunConfig) -> Flags:
    """Prefixes and weights as Megatron takes them; a path with a space is quoted in data.path.

    Where random tokens stand in for data, the tokenizer is one that only counts: its vocabulary and one
    end-of-document token fill the model's table.
    """
    flags: Flags = {}
    if plan.files.data_path:
        flags["--data-path"] = tuple(shlex.quote(_text(word)) for word in _prefixes(plan.files.data_path))
        flags["--split"] = ("100,0,0",)
    if plan.files.tokenizer:
        sentencepiece = plan.files.tokenizer.endswith(".model")
        kind = "GPTSentencePieceTokenizer" if sentencepiece else "HuggingFaceTokenizer"
        return {**flags, **_flags(tokenizer_type=kind, tokenizer_model=plan.files.tokenizer)}
    if "mock-data" in config.engine.extra:
        (decoder,) = config.model.components.values()
        assert isinstance(decoder, Decoder)
        flags |= _flags(tokenizer_type="NullTokenizer", vocab_size=decoder.vocab - 1)
    return flags


def _prefixes(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"data.path is {text!r}: {error}. Close the quotes, or quote the whole path"
        ) from error


def _checkpoints(plan: Plan) -> Flags:
    """Megatron saves at every interval, at the end, and on SIGTERM (--exit-signal-handler)."""
    files = plan.files
    weights_only = files.weights if not files.checkpoint_load else ""
    return {
        "--save": (checkpoint_word(plan),),
        **_flags(
            save_interval=files.checkpoint_every or plan.training.steps,
            load=files.checkpoint_load or None,
            pretrained_checkpoint=weights_only or None,
            finetune=bool(weights_only),
            exit_signal_handler=True,
        ),
    }


def _attention(plan: Plan) -> str:
    """FlashAttention where it exists: half precision, from Ampere on; the framework's choice elsewhere."""
    return "auto" if plan.training.precision == "fp32" or plan.cluster.gpu.startswith("V100") else "flash"
