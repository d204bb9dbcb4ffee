"""The command line of Megatron-LM's pretrain script for one decoder: flag -> its values as shell words.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM, core_v0.12.0 to core_v0.19.0 (parser and
validate_args); what differs by version stands in the engine's catalogue.
"""

from __future__ import annotations

from dslaunch.engines.megatron_catalogue import Catalogue, megatron_catalogue
from dslaunch.errors import ConfigError
from dslaunch.model.shapes import counted_ends
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.megatron_flags import Flags, flags, merge_extra, require_known
from dslaunch.render.megatron_model import model_flags
from dslaunch.render.megatron_shared import batch_and_schedule, data, full_or_selective
from dslaunch.render.program import checkpoint_word
from dslaunch.render.timeouts import whole_minutes
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder


def megatron_flags(plan: Plan, config: RunConfig) -> Flags:
    """All flags, in the order in which a reader looks for them, engine.extra laid over them.

    Raises:
        ConfigError: something that the version's parser, or Megatron's model, cannot express.
    """
    (name,) = plan.components
    component, decoder = plan.components[name], config.model.components[name]
    assert isinstance(decoder, Decoder), "the engine megatron takes a single decoder"
    catalogue = megatron_catalogue(plan.engine.version)
    made = {
        **model_flags(name, decoder, component, plan, catalogue),
        **_parallel(plan, decoder, component),
        **batch_and_schedule(plan, component),
        **precision(plan),
        **full_or_selective(component),
        **data(plan),
        **tokenizer(plan, config, decoder),
        **checkpoints(plan),
        **framework(plan, decoder),
    }
    return finished(made, plan, config, catalogue)


def finished(made: Flags, plan: Plan, config: RunConfig, catalogue: Catalogue) -> Flags:
    """`made`, known to the version, with engine.extra laid over it."""
    require_known(made, catalogue)
    _require_fp8(plan, config)
    return merge_extra(made, config.engine.extra, catalogue)


def framework(plan: Plan, decoder: Decoder) -> Flags:
    """Kernels, and what is printed.

    They mask what is to come by themselves; the loader's mask, seq_len x seq_len bytes on the GPU, has no reader.
    """
    return flags(
        transformer_impl="transformer_engine",
        attention_backend=_backend(plan, decoder),
        no_create_attention_mask_in_dataloader=True,
        cross_entropy_loss_fusion=True,
        distributed_timeout_minutes=whole_minutes(plan.launcher.timeout_minutes),
        log_interval=1,
        log_throughput=True,
    )


def _parallel(plan: Plan, decoder: Decoder, component: ComponentPlan) -> Flags:
    overlap = plan.training.overlap_comm and component.dp * component.cp > 1
    sequence = component.tp > 1 and plan.training.sequence_parallel
    return {
        **flags(
            tensor_model_parallel_size=component.tp,
            pipeline_model_parallel_size=component.pp,
        ),
        **_stages(decoder, component),
        **flags(
            context_parallel_size=component.cp,
            sequence_parallel=sequence,
            use_distributed_optimizer=component.zero == 1,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and component.zero == 1,
        ),
    }


def _stages(decoder: Decoder, component: ComponentPlan) -> Flags:
    """Which layers stand in which stage: equal ones, other ends, or all of them written out."""
    layers, vpp = component.layers_per_stage, component.vpp
    if len(set(layers[1:-1])) > 1:
        return flags(pipeline_model_parallel_layout=_written_out(layers, vpp, decoder.mtp_layers))
    # Of two stages the first says it all: cores before 0.16 divide what is left by the stages that are left.
    ends = flags(
        decoder_first_pipeline_num_layers=layers[0],
        decoder_last_pipeline_num_layers=layers[-1] if len(layers) > 2 else None,
    )
    virtual = flags(num_virtual_stages_per_pipeline_rank=vpp if vpp > 1 else None)
    embedding, loss = counted_ends(layers, vpp)
    if embedding or loss:
        counted = flags(
            account_for_embedding_in_pipeline_split=embedding, account_for_loss_in_pipeline_split=loss
        )
        return {**virtual, **counted}
    return {**virtual, **(ends if len(set(layers)) > 1 else {})}


def _written_out(layers: tuple[int, ...], vpp: int, mtp_layers: int) -> str:
    """Every virtual stage in order of its layers: E embedding, t a layer, m a prediction layer, L the loss."""
    parts = ["t" * (count // vpp) for _ in range(vpp) for count in layers]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * mtp_layers + "L"
    return "|".join(parts)


def precision(plan: Plan) -> Flags:
    """fp32 accumulation is written out; bf16 gradients are reduced in bf16 only where the plan says so."""
    half, accum = plan.training.precision, plan.training.grad_accum_dtype
    return flags(
        bf16=half == "bf16",
        fp16=half == "fp16",
        accumulate_allreduce_grads_in_fp32=half != "fp32" and accum == "fp32",
        grad_reduce_in_bf16=half == accum == "bf16",
    )


def _require_fp8(plan: Plan, config: RunConfig) -> None:
    """engine.extra.fp8-format on a GPU that has no such arithmetic would stop in Transformer Engine."""
    has = config.cluster.gpu.peak_tflops
    if "fp8-format" in config.engine.extra and "fp8" not in has:
        raise ConfigError(
            f"engine.extra.fp8-format: {plan.cluster.gpu} computes in {', '.join(sorted(has))}, not in fp8. "
            "Take it out, or plan for a GPU that has fp8"
        )


def tokenizer(plan: Plan, config: RunConfig, decoder: Decoder) -> Flags:
    """The data's tokenizer, or, where random tokens stand in for data, one that only counts.

    Its vocabulary and one end-of-document token fill the model's table.
    """
    if plan.files.tokenizer:
        sentencepiece = plan.files.tokenizer.endswith(".model")
        kind = "GPTSentencePieceTokenizer" if sentencepiece else "HuggingFaceTokenizer"
        return flags(tokenizer_type=kind, tokenizer_model=plan.files.tokenizer)
    if "mock-data" in config.engine.extra:
        return flags(tokenizer_type="NullTokenizer", vocab_size=decoder.vocab - 1)
    return {}


def checkpoints(plan: Plan) -> Flags:
    """Megatron saves at every interval, at the end, and on SIGTERM (--exit-signal-handler)."""
    files = plan.files
    weights_only = files.weights if not files.checkpoint_load else ""
    return {
        "--save": (checkpoint_word(plan),),
        **flags(
            save_interval=files.checkpoint_every or plan.training.steps,
            load=files.checkpoint_load or None,
            pretrained_checkpoint=weights_only or None,
            finetune=bool(weights_only),
            exit_signal_handler=True,
        ),
    }


def _backend(plan: Plan, decoder: Decoder) -> str:
    """FlashAttention where it exists: half precision, from Ampere on; the framework's choice elsewhere.

    FlashAttention 2 takes no values of another width than the keys, as latent attention has them.
    """
    without = plan.training.precision == "fp32" or plan.cluster.gpu.startswith("V100") or decoder.mla is not None
    return "auto" if without else "flash"
