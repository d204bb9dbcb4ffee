"""A decoder in the flags of Megatron-LM: attention, experts, vocabulary.

Source: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of NVIDIA/Megatron-LM,
core_v0.12.0 to core_v0.19.0.
"""

from __future__ import annotations

from dslaunch.engines.megatron_catalogue import Catalogue
from dslaunch.errors import ConfigError
from dslaunch.model.params import padded_vocab
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.megatron_flags import Flags, first_known, flags
from dslaunch.render.megatron_shared import sizes, whole_base
from dslaunch.schema.layer import Experts, LatentAttention
from dslaunch.schema.model import Decoder


def model_flags(
    name: str, decoder: Decoder, component: ComponentPlan, plan: Plan, catalogue: Catalogue
) -> Flags:
    """The model, as `catalogue`'s version takes it.

    Raises:
        ConfigError: something that Megatron's model cannot express, in this version or in any.
    """
    # One bias for all linear layers but qkv: the engine's limits.
    return {
        **sizes(name, decoder, plan.training.seq_len),
        **_attention(decoder, catalogue),
        **flags(
            normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[decoder.norm],
            norm_epsilon=decoder.norm_eps,
            disable_bias_linear=not decoder.mlp_bias,
            add_qkv_bias=decoder.qkv_bias and not decoder.mlp_bias,
        ),
        **_positions(name, decoder),
        **_experts(decoder, component, plan, catalogue),
        **_further_tokens(name, decoder),
        **_vocabulary(decoder, component.tp, catalogue),
    }


def _attention(decoder: Decoder, catalogue: Catalogue) -> Flags:
    if decoder.mla:
        return {**_latent(decoder.mla), **first_known(catalogue, flags(rope_type="rope"), {})}
    grouped = decoder.kv_heads != decoder.heads
    return {
        **flags(
            group_query_attention=grouped,
            num_query_groups=decoder.kv_heads if grouped else None,
            kv_channels=decoder.head_dim or decoder.hidden // decoder.heads,
            qk_layernorm=decoder.qk_norm,
        ),
        **_window(decoder),
    }


def _latent(mla: LatentAttention) -> Flags:
    """Multi-latent attention; its latents have norms, which --qk-layernorm turns on.

    Fused rotary positions are on by default, and Megatron's configuration stops there: before 0.14 for latent
    attention as such, since then where its positions are not YaRN's (megatron/core/transformer/
    transformer_config.py, core_v0.12.0 to core_v0.19.0).
    """
    return flags(
        multi_latent_attention=True,
        q_lora_rank=mla.q_lora_rank or None,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        qk_layernorm=True,
        no_rope_fusion=True,
    )


def _window(decoder: Decoder) -> Flags:
    """Megatron counts the tokens before a query, dslaunch the query's own too; every n-th layer sees all."""
    window = decoder.window
    if window is None:
        return {}
    return flags(
        window_size=f"{window.tokens - 1},0", window_attn_skip_freq=window.full_every or None
    )


def _positions(name: str, decoder: Decoder) -> Flags:
    if decoder.position == "learned":
        return flags(position_embedding_type="learned_absolute")
    return flags(position_embedding_type="rope", rotary_base=whole_base(name, decoder, "--rotary-base"))


def _further_tokens(name: str, decoder: Decoder) -> Flags:
    if not decoder.mtp_layers:
        return {}
    key = f"model.components.{name}.mtp_layers is {decoder.mtp_layers}"
    if decoder.position != "rope":
        raise ConfigError(f"{key}, position {decoder.position}: Megatron takes rotary positions only. Set it to 0")
    return flags(mtp_num_layers=decoder.mtp_layers)


_ROUTED_IN_FP32 = 32
"""Experts from which on Megatron's configuration warns of a router in half precision."""


def _experts(decoder: Decoder, component: ComponentPlan, plan: Plan, catalogue: Catalogue) -> Flags:
    """Routed experts are cut over etp ranks, which are tp unless the plan says so.

    Their grouped matrix products are for bf16, from Ampere on.
    """
    experts = decoder.experts
    if experts is None:
        return {}
    deepep = "deepep" in plan.engine.modes
    dense, mixed = experts.dense_layers, decoder.layers - experts.dense_layers
    return {
        **flags(
            num_experts=experts.count,
            moe_router_topk=experts.top_k,
            moe_ffn_hidden_size=experts.ffn,
            moe_shared_expert_intermediate_size=experts.shared_ffn or None,
            moe_shared_expert_gate=experts.shared_gate,
            moe_layer_freq=f"([0]*{dense}+[1]*{mixed})" if dense else None,
            moe_grouped_gemm=plan.training.precision == "bf16" and not plan.cluster.gpu.startswith("V100"),
            moe_router_dtype="fp32" if deepep or experts.count >= _ROUTED_IN_FP32 else None,
            moe_token_dispatcher_type="flex" if deepep else "alltoall",
            expert_model_parallel_size=component.ep,
            expert_tensor_parallel_size=component.expert_tp,
        ),
        **(_deepep(catalogue) if deepep else {}),
        **_choice(experts),
        **_balance(experts),
    }


def _deepep(catalogue: Catalogue) -> Flags:
    """The flexible dispatcher's kernels, which take router probabilities in fp32."""
    return first_known(catalogue, flags(moe_flex_dispatcher_backend="deepep"), flags(moe_enable_deepep=True))


def _choice(experts: Experts) -> Flags:
    """Which experts a token goes to where groups limit it, and the factor on what they give."""
    grouped, factor = experts.n_group > 1, experts.routed_scaling_factor
    return flags(
        moe_router_num_groups=experts.n_group if grouped else None,
        moe_router_group_topk=experts.topk_group if grouped else None,
        moe_router_topk_scaling_factor=factor if factor != 1 else None,
    )


def _balance(experts: Experts) -> Flags:
    """How the router shares out tokens; engine.extra has the last word.

    With a bias per expert: DeepSeek-V3's sigmoid scores, bias step 0.001 and sequence loss 0.0001
    (arXiv:2412.19437 section 4.2). Without: the auxiliary loss at 0.01 (arXiv:2101.03961 section 2.2).
    """
    if experts.router_bias:
        return flags(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.001,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.0001,
        )
    return flags(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)


def _vocabulary(decoder: Decoder, tp: int, catalogue: Catalogue) -> Flags:
    """The table has the model's rows, filled up to a multiple of tp, whatever the tokenizer's number is.

    A version without --padded-vocab-size pads to a multiple of (its flag x tp): one such multiple is the table.
    """
    rows = padded_vocab(decoder, tp)
    return first_known(
        catalogue, flags(padded_vocab_size=rows * tp), flags(make_vocab_size_divisible_by=rows)
    )
