"""The command line of an entry beside Megatron-LM's examples/mimo: two grids, and the language model.

The stock sizes of parallelism stay 1: each grid has flags of its own. Which tower is built is the provider's
business; no flag says it. Source: NVIDIA/Megatron-LM core_v0.19.0, examples/mimo/pretrain_mimo.py,
examples/mimo/training/args.py and examples/mimo/model_providers/nemotron_moe_vlm.py.
"""

from __future__ import annotations

from dslaunch.engines.megatron_catalogue import megatron_mimo_catalogue
from dslaunch.engines.megatron_mimo import Parts, parts
from dslaunch.planfile import Plan
from dslaunch.render.megatron import checkpoints, finished, framework, precision, tokenizer
from dslaunch.render.megatron_flags import Flags, flags
from dslaunch.render.megatron_model import model_flags
from dslaunch.render.megatron_shared import batch_and_schedule, data, full_or_selective
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Decoder


def megatron_mimo_flags(plan: Plan, config: RunConfig) -> Flags:
    """All flags, engine.extra laid over them; raises ConfigError like megatron_flags."""
    found = parts(config)
    assert found is not None, "the engine megatron_mimo takes a tower, a projector and a decoder"
    llm, decoder = plan.components[found.llm], config.model.components[found.llm]
    assert isinstance(decoder, Decoder)
    catalogue = megatron_mimo_catalogue(plan.engine.version)
    overlap = plan.training.overlap_comm
    model = model_flags(found.llm, decoder, llm, plan, catalogue)
    made = {
        **{flag: values for flag, values in model.items() if flag not in _STOCK_SIZES},
        **_grids(plan, found, decoder),
        **_frozen(plan, found),
        **flags(image_seq_length=_image_tokens(config, found)),
        **batch_and_schedule(plan, llm),
        **precision(plan),
        **flags(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            calculate_per_token_loss=True,
            rerun_mode="disabled",
        ),
        **full_or_selective(llm),
        **data(plan),
        **tokenizer(plan, config, decoder),
        **checkpoints(plan),
        **framework(plan, decoder),
    }
    return finished(made, plan, config, catalogue)


_STOCK_SIZES = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")


def _grids(plan: Plan, found: Parts, decoder: Decoder) -> Flags:
    """The tower's grid starts at rank 0, the language model's after it."""
    encoder, llm = plan.components[found.encoder], plan.components[found.llm]
    return flags(
        encoder_tp=encoder.tp,
        encoder_dp=encoder.dp,
        llm_offset=llm.rank_offset,
        llm_tp=llm.tp,
        llm_cp=llm.cp,
        llm_pp=llm.pp,
        llm_dp=llm.dp,
        llm_ep=llm.ep,
        llm_expt_tp=llm.expert_tp if decoder.experts else None,
    )


def _frozen(plan: Plan, found: Parts) -> Flags:
    return flags(
        freeze_vit=not plan.components[found.encoder].trainable,
        freeze_projection=bool(found.projector) and not plan.components[found.projector].trainable,
        freeze_lm=not plan.components[found.llm].trainable,
    )


def _image_tokens(config: RunConfig, found: Parts) -> int:
    """Image tokens of a sample in the language model's sequence."""
    return sum(edge.tokens for edge in config.model.edges if edge.to == found.llm and edge.join == "sequence")
