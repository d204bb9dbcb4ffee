"""How each family of transformers' classes is cut: names of modules, as transformers 5 has them.

Sources: transformers 5.24.0, src/transformers/models/NAME/modeling_NAME.py of each family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SIZES = (("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads"))


@dataclass(frozen=True)
class Family:
    """Names are the last words of a module's path, or paths from the model where it says so."""

    layers: str
    """Path of the list of layers."""
    column: tuple[str, ...]
    """Linear layers cut by their outputs."""
    row: tuple[str, ...]
    """Linear layers cut by their inputs."""
    key_value: tuple[str, ...] = ()
    """Of `column`: those whose outputs are key or value heads, copied where there are fewer than shards."""
    fused: tuple[str, ...] = ()
    """Linear layers whose outputs are query, key and value, one after another."""
    by_head: tuple[str, ...] = ()
    """Norms over one head, the same for all heads: each shard sees the gradient of its own heads."""
    local_heads: tuple[str, ...] = ()
    """Attributes of attention that count heads, and become this shard's."""
    stem: tuple[str, ...] = ()
    """Paths of what runs before the first layer."""
    tail: tuple[str, ...] = ()
    """Paths of what runs after the last layer, over all tokens."""
    idle: tuple[str, ...] = ()
    """Paths of what is made and never run where tokens are what is passed on; it stays frozen."""
    absent: tuple[str, ...] = ()
    """Paths of pooling heads, which are left out."""
    without: tuple[tuple[str, bool], ...] = ()
    """Attributes of the configuration that say so of `absent`, for who reads what was trained."""
    prefix: int = 0
    """Tokens before the patches, which are not passed on."""
    attention: str = "sdpa"
    """transformers' attn_implementation."""
    sizes: tuple[tuple[str, str], ...] = _SIZES
    """(setting of the component, attribute of the configuration) that must agree."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Attributes of the configuration that must be 0."""
    in_files: tuple[tuple[str, str], ...] = ()
    """(word in a parameter's path, the one that stands for it in files of weights)"""


_DECODER_SIZES = (
    *_SIZES,
    ("kv_heads", "num_key_value_heads"),
    ("ffn", "intermediate_size"),
    ("vocab", "vocab_size"),
    ("tied_embeddings", "tie_word_embeddings"),
)
_LLAMA = Family(
    layers="layers",
    column=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    row=("o_proj", "down_proj"),
    key_value=("k_proj", "v_proj"),
    by_head=("q_norm", "k_norm"),
    stem=("embed_tokens",),
    tail=("norm",),
    sizes=_DECODER_SIZES,
)
_SOFT_CAPPED = replace(_LLAMA, attention="eager")
_TOWER_SIZES = (*_SIZES, ("ffn", "intermediate_size"), ("patch", "patch_size"), ("image", "image_size"))
_CLIP = Family(
    layers="encoder.layers",
    column=("q_proj", "k_proj", "v_proj", "fc1"),
    row=("out_proj", "fc2"),
    stem=("embeddings", "pre_layrnorm"),
    idle=("post_layernorm",),
    prefix=1,
    sizes=_TOWER_SIZES,
)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _SOFT_CAPPED,
    "gemma3_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "clip_vision_model": _CLIP,
    "siglip_vision_model": Family(
        layers="encoder.layers",
        column=_CLIP.column,
        row=_CLIP.row,
        stem=("embeddings",),
        tail=("post_layernorm",),
        absent=("head",),
        without=(("vision_use_head", False),),
        sizes=_TOWER_SIZES,
    ),
    "vit": Family(
        layers="layers",
        column=_CLIP.column,
        row=("o_proj", "fc2"),
        stem=("embeddings",),
        tail=("layernorm",),
        absent=("pooler",),
        prefix=1,
        sizes=_TOWER_SIZES,
        dropouts=("attention_probs_dropout_prob", "hidden_dropout_prob"),
        in_files=(
            ("layers.", "encoder.layer."), ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"), ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"), ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ),
    ),
    "qwen2_5_vl_vision": Family(
        layers="blocks",
        column=("gate_proj", "up_proj"),
        row=("proj", "down_proj"),
        fused=("qkv",),
        stem=("patch_embed",),
        local_heads=("num_heads",),
        absent=("merger",),
        sizes=(
            ("layers", "depth"), ("hidden", "hidden_size"), ("heads", "num_heads"), ("ffn", "intermediate_size"),
            ("patch", "patch_size"), ("temporal_patch", "temporal_patch_size"), ("channels", "in_channels"),
        ),
        dropouts=(),
    ),
}  # fmt: skip
"""By `model_type` of a configuration."""
