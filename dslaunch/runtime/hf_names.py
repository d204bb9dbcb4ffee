"""dslaunch's own architectures in the words of transformers: the class that is the same, its settings and names.

Verified on transformers 5 by equal outputs of both (tests/real/test_export.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.runtime.components import VIT_NORM_EPS
from dslaunch.runtime.supported import Spec


@dataclass(frozen=True)
class Twin:
    """A class of transformers that computes what a component computes."""

    config: dict[str, Any]
    """Its config.json."""
    names: Mapping[str, str]
    """From words of dslaunch's parameter names to its own."""
    ahead: str = ""
    """What its names begin with, where none of `outside` stands there."""
    outside: tuple[str, ...] = ()
    table: str = ""
    """A parameter that it holds as a table, without the dimension of the batch."""

    def name(self, key: str) -> str:
        """Its name of dslaunch's parameter `key`."""
        for mine, its in self.names.items():
            key = key.replace(mine, its)
        return key if key.startswith(self.outside or ("\0",)) else f"{self.ahead}{key}"


_DECODER = {
    "embedding.": "embed_tokens.", "blocks.": "layers.", "norm1.": "input_layernorm.",
    "norm2.": "post_attention_layernorm.", "attention.query.": "self_attn.q_proj.",
    "attention.key.": "self_attn.k_proj.", "attention.value.": "self_attn.v_proj.",
    "attention.out.": "self_attn.o_proj.", "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.", "feed_forward.down.": "mlp.down_proj.", "head.": "lm_head.",
}  # fmt: skip
_SIGLIP = {
    "patch.": "embeddings.patch_embedding.", "positions": "embeddings.position_embedding.weight",
    "blocks.": "encoder.layers.", "norm1.": "layer_norm1.", "norm2.": "layer_norm2.",
    "attention.query.": "self_attn.q_proj.", "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.", "attention.out.": "self_attn.out_proj.",
    "feed_forward.up.": "mlp.fc1.", "feed_forward.down.": "mlp.fc2.", "post_norm.": "post_layernorm.",
}  # fmt: skip


def twin_of(spec: Spec, positions: int, dtype: str) -> Twin | None:
    """The class of transformers that is the component; None where there is none.

    Args:
        positions: tokens of a sample.
    """
    if spec["arch"] == "decoder":
        return _decoder(spec, positions, dtype)
    return _siglip(spec, dtype) if spec["arch"] == "vit" else None


def _decoder(spec: Spec, positions: int, dtype: str) -> Twin | None:
    """Llama, or Qwen2 where query, key and value alone have a bias."""
    if spec["position"] != "rope" or spec["norm"] != "rmsnorm" or not spec["gated_mlp"]:
        return None
    qwen = spec["qkv_bias"] and not spec["out_bias"] and not spec["mlp_bias"]
    if not qwen and spec["qkv_bias"] != spec["out_bias"]:
        return None
    config = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
        "dtype": dtype,
        "hidden_size": spec["hidden"],
        "intermediate_size": spec["ffn"],
        "num_hidden_layers": spec["layers"],
        "num_attention_heads": spec["heads"],
        "num_key_value_heads": spec["kv_heads"],
        "head_dim": spec["head_dim"] or spec["hidden"] // spec["heads"],
        "vocab_size": spec["vocab"],
        "rms_norm_eps": spec["norm_eps"],
        "rope_theta": spec["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": spec["rope_theta"]},
        "tie_word_embeddings": spec["tied_embeddings"],
        "max_position_embeddings": max(positions, spec["max_positions"]),
        "hidden_act": "silu",
    }
    biases = {} if qwen else {"attention_bias": spec["qkv_bias"], "mlp_bias": spec["mlp_bias"]}
    return Twin(config | biases, _DECODER, "model.", ("lm_head.",))


def _siglip(spec: Spec, dtype: str) -> Twin | None:
    plain = not (
        spec["class_token"] or spec["registers"] or spec["layer_scale"] or spec["gated_mlp"] or spec["pre_norm"]
        or spec["attention_pooling"]
    )  # fmt: skip
    # transformers' class has no size of a head apart from the width.
    heads = not spec["head_dim"] or spec["head_dim"] * spec["heads"] == spec["hidden"]
    if not (plain and heads and spec["patch_bias"] and spec["post_norm"]):
        return None
    config = {
        "architectures": ["SiglipVisionModel"],
        "model_type": "siglip_vision_model",
        "dtype": dtype,
        "hidden_size": spec["hidden"],
        "intermediate_size": spec["ffn"],
        "num_hidden_layers": spec["layers"],
        "num_attention_heads": spec["heads"],
        "num_channels": spec["channels"],
        "image_size": spec["image"],
        "patch_size": spec["patch"],
        "layer_norm_eps": VIT_NORM_EPS,
        "hidden_act": "gelu",
        "vision_use_head": False,
    }
    return Twin(config, _SIGLIP, "", (), "positions")
