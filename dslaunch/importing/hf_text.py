"""Language models of transformers as decoders. Sizes as modeling_*.py of transformers 5.24.0 builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_fields import Fields

Keys = dict[str, Any]


def decoder(fields: Fields) -> Keys:
    """The component of a language model; `fields.kind` is one of DECODERS."""
    return {"arch": "decoder", **DECODERS[fields.kind](fields)}


def _common(fields: Fields) -> Keys:
    """What all but GPT-2 name alike."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    keys: Keys = {
        "layers": fields.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.count("num_key_value_heads") or heads,
        "ffn": fields.number("intermediate_size"),
        "vocab": fields.number("vocab_size"),
        "max_positions": fields.number("max_position_embeddings"),
        "rope_theta": fields.rope_theta(),
        "norm_eps": fields.real("rms_norm_eps", "norm_epsilon"),
    }
    head_dim = fields.count("head_dim")
    if head_dim and head_dim * heads != hidden:
        keys["head_dim"] = head_dim
    if fields.get("tie_word_embeddings"):
        keys["tied_embeddings"] = True
    return keys


def _attention_bias(fields: Fields) -> Keys:
    biased = bool(fields.get("attention_bias"))
    return {"qkv_bias": True, "out_bias": True} if biased else {}


def _llama(fields: Fields) -> Keys:
    mlp = {"mlp_bias": True} if fields.get("mlp_bias") else {}
    return _common(fields) | _attention_bias(fields) | mlp


def _mistral(fields: Fields) -> Keys:
    window = fields.get("sliding_window")
    return _common(fields) | ({"window": {"tokens": window}} if window else {})


def _mixtral(fields: Fields) -> Keys:
    experts = {
        "count": fields.number("num_local_experts", "num_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "ffn": fields.number("intermediate_size"),
    }
    return _mistral(fields) | {"experts": experts}


def _qwen2(fields: Fields) -> Keys:
    """A window holds from max_window_layers on, which `window` cannot say."""
    uses, first = fields.get("use_sliding_window"), fields.count("max_window_layers")
    fields.get("sliding_window")
    keys = _common(fields) | {"qkv_bias": True}
    if uses and first < keys["layers"]:
        fields.note(
            "use_sliding_window", f"layers from {first} on see a window; all are planned as seeing everything"
        )
    return _regular(fields, keys)


def _qwen2_moe(fields: Fields) -> Keys:
    keys = _qwen2(fields) | {"experts": _qwen_experts(fields)}
    keys["experts"] |= {"shared_ffn": fields.get("shared_expert_intermediate_size"), "shared_gate": True}
    return keys | {"qkv_bias": bool(fields.get("qkv_bias"))}


def _qwen3(fields: Fields) -> Keys:
    return {**_qwen2(fields), "qkv_bias": False, "qk_norm": True} | _attention_bias(fields)


def _qwen3_moe(fields: Fields) -> Keys:
    return _qwen3(fields) | {"experts": _qwen_experts(fields)}


def _qwen_experts(fields: Fields) -> Keys:
    """Every decoder_sparse_step-th layer has experts, except mlp_only_layers; only a dense start can be said."""
    layers = fields.number("num_hidden_layers")
    step, dense = fields.number("decoder_sparse_step"), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{fields.where}mlp_only_layers is {dense!r}: a list belongs here")
    mixed = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if mixed != list(range(layers - len(mixed), layers)) or not mixed:
        raise ConfigError(
            f"{fields.where}decoder_sparse_step is {step} and mlp_only_layers {dense}: experts in some layers "
            "only are not modelled, except for dense layers at the start"
        )
    experts: Keys = {
        "count": fields.number("num_experts", "num_local_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "ffn": fields.number("moe_intermediate_size"),
    }
    return experts | ({"dense_layers": layers - len(mixed)} if len(mixed) < layers else {})


def _regular(fields: Fields, keys: Keys) -> Keys:
    """Takes layer_types as read where every layer attends to everything."""
    if set(map(str, fields.get("layer_types") or ())) > {"full_attention"}:
        fields.note("layer_types")
    return keys


def _gemma(fields: Fields) -> Keys:
    return _common(fields) | _attention_bias(fields)


def _gemma2(fields: Fields) -> Keys:
    keys = _gemma(fields) | {"post_norms": True}
    return keys | _alternating(fields, keys["layers"], 2)


def _gemma3(fields: Fields) -> Keys:
    fields.get("rope_local_base_freq")
    every = fields.count("sliding_window_pattern", "_sliding_window_pattern") or 6
    keys = _gemma(fields) | {"post_norms": True, "qk_norm": True}
    return keys | _alternating(fields, keys["layers"], every)


def _alternating(fields: Fields, layers: int, every: int) -> Keys:
    """Windows in all layers but each `every`-th, which layer_types has to agree with."""
    kinds = fields.get("layer_types")
    expected = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    if kinds and list(kinds) != expected:
        fields.note("layer_types")
    return {"window": {"tokens": fields.number("sliding_window"), "full_every": every}}


def _gpt2(fields: Fields) -> Keys:
    hidden, heads = fields.number("n_embd", "hidden_size"), fields.number("n_head", "num_attention_heads")
    return {
        "layers": fields.number("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": fields.count("n_inner") or 4 * hidden,
        "vocab": fields.number("vocab_size"),
        "tied_embeddings": bool(fields.get("tie_word_embeddings")),
        "gated_mlp": False,
        "norm": "layernorm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "position": "learned",
        "max_positions": fields.number("n_positions", "max_position_embeddings"),
        "norm_eps": fields.real("layer_norm_epsilon"),
    }


def _shared_expert_moe(fields: Fields) -> Keys:
    """DeepSeek's experts, which GLM-4.5 has too; DeepSeek-V2's router has no bias."""
    if fields.get("num_nextn_predict_layers"):
        fields.note("num_nextn_predict_layers")
    width = fields.number("moe_intermediate_size")
    return {
        "count": fields.number("n_routed_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "ffn": width,
        "shared_ffn": width * fields.count("n_shared_experts"),
        "dense_layers": fields.count("first_k_dense_replace"),
        "router_bias": fields.kind != "deepseek_v2",
        "n_group": fields.count("n_group") or 1,
        "topk_group": fields.count("topk_group") or 1,
        "routed_scaling_factor": fields.real("routed_scaling_factor")
        if fields.get("routed_scaling_factor")
        else 1.0,
    }


def _deepseek(fields: Fields) -> Keys:
    fields.get("num_key_value_heads")
    if fields.get("attention_bias"):
        raise ConfigError(
            f"{fields.where}attention_bias is true: latent attention with biases is not modelled"
        )
    keys = _common(fields)
    keys.pop("head_dim", None)
    mla = {
        "q_lora_rank": fields.count("q_lora_rank"),
        "kv_lora_rank": fields.number("kv_lora_rank"),
        "qk_nope_head_dim": fields.number("qk_nope_head_dim"),
        "qk_rope_head_dim": fields.number("qk_rope_head_dim"),
        "v_head_dim": fields.number("v_head_dim"),
    }
    return keys | {"kv_heads": keys["heads"], "mla": mla, "experts": _shared_expert_moe(fields)}


def _glm4_moe(fields: Fields) -> Keys:
    """Unlike others, attention_bias puts none on the output projection."""
    bias = {"qkv_bias": True} if fields.get("attention_bias") else {}
    norm = {"qk_norm": True} if fields.get("use_qk_norm") else {}
    return _common(fields) | bias | norm | {"experts": _shared_expert_moe(fields)}


def _llama4(fields: Fields) -> Keys:
    """Experts as wide as the shared one; the norms of queries and keys have no parameters."""
    layers, step = fields.number("num_hidden_layers"), fields.number("interleave_moe_layer_step")
    mixed = fields.get("moe_layers")
    if (mixed if mixed is not None else list(range(step - 1, layers, step))) != list(range(layers)):
        raise ConfigError(
            f"{fields.where}interleave_moe_layer_step is {step}: experts in some layers only are not modelled"
        )
    width = fields.number("intermediate_size")
    fields.get("use_qk_norm")
    if fields.get("attention_chunk_size"):
        fields.note("attention_chunk_size", "most layers see their chunk only; the plan has all see everything")
        fields.get("layer_types")
    experts = {
        "count": fields.number("num_local_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "ffn": width,
        "shared_ffn": width,
    }
    return _common(fields) | _attention_bias(fields) | {
        "ffn": fields.number("intermediate_size_mlp"), "experts": experts,
    }  # fmt: skip


def _gpt_oss(fields: Fields) -> Keys:
    """All linear layers have a bias, the router and the experts too; every other layer has a window."""
    keys = _common(fields) | {"mlp_bias": True, "sinks": True} | _attention_bias(fields)
    experts = {
        "count": fields.number("num_local_experts", "num_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "ffn": fields.number("intermediate_size"),
        "biased_router": True,
    }
    return keys | {"experts": experts} | _alternating(fields, keys["layers"], 2)


def _starcoder2(fields: Fields) -> Keys:
    bias = bool(fields.get("use_bias"))
    return _mistral(fields) | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias) | {
        "norm": "layernorm", "gated_mlp": False,
    }  # fmt: skip


def _seed_oss(fields: Fields) -> Keys:
    biases = {"qkv_bias": "attention_bias", "out_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
    return _common(fields) | {key: True for key, name in biases.items() if fields.get(name)}


def _glm4(fields: Fields) -> Keys:
    return _common(fields) | {"post_norms": True} | ({"qkv_bias": True} if fields.get("attention_bias") else {})


def _falcon(fields: Fields) -> Keys:
    """Attention and MLP run side by side, each from a norm of its own."""
    new = fields.get("new_decoder_architecture")
    norms = fields.get("num_ln_in_parallel_attn")
    if fields.get("alibi") or (fields.get("parallel_attn") and not (new and norms in (None, 2))):
        raise ConfigError(
            f"{fields.where}alibi {fields.get('alibi')}, new_decoder_architecture {new}, num_ln_in_parallel_attn "
            f"{norms}: positions by ALiBi, and one norm for attention and MLP together, are not modelled"
        )
    if fields.get("parallel_attn"):
        fields.note("parallel_attn", "attention and MLP side by side: the plan counts them one after the other")
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads", "n_head")
    bias = bool(fields.get("bias"))
    grouped = fields.count("num_kv_heads") if new else 0
    fields.get("multi_query")
    return {
        "layers": fields.number("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": grouped or (1 if fields.get("multi_query") and not new else heads),
        "ffn": fields.count("ffn_hidden_size") or 4 * hidden,
        "vocab": fields.number("vocab_size"),
        "tied_embeddings": bool(fields.get("tie_word_embeddings")),
        "gated_mlp": False,
        "norm": "layernorm",
        "norm_eps": fields.real("layer_norm_epsilon"),
        "max_positions": fields.number("max_position_embeddings"),
        "rope_theta": fields.rope_theta(),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }


DECODERS: dict[str, Callable[[Fields], Keys]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "llama4_text": _llama4,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _mistral,
    "qwen2": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen2_vl_text": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_vl_text": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _llama,
    "starcoder2": _starcoder2,
}
