"""The decoder that Megatron's flags describe.

Defaults of flags that are absent: megatron/training/arguments.py of NVIDIA/Megatron-LM at core_v0.16.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.megatron_flags import Flags

Keys = dict[str, Any]
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Entries of tokenizers that there is one of."""


def take_decoder(flags: Flags, tp: int, given: Mapping[str, Any]) -> Keys:
    """The component; `given` holds keys that the user says, which win.

    Raises:
        ConfigError: a size that the flags do not say.
    """
    layers, hidden = _required(flags, "--num-layers"), _required(flags, "--hidden-size")
    heads = _required(flags, "--num-attention-heads")
    gated = flags.on("--swiglu")
    ffn = flags.number("--ffn-hidden-size")
    ffn = ffn or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    keys: Keys = {
        "arch": "decoder",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _kv_heads(flags, heads),
        "ffn": ffn,
        "vocab": given.get("vocab") or _vocab(flags, tp),
        "tied_embeddings": not flags.on("--untie-embeddings-and-output-weights"),
        "gated_mlp": gated,
        "norm": _norm(flags),
        "norm_eps": flags.real("--norm-epsilon", "--layernorm-epsilon") or 1e-5,
        **_biases(flags),
        **_positions(flags),
        **_experts(flags, ffn),
        **_latent(flags),
    }
    channels = flags.number("--kv-channels")
    if channels and channels * heads != hidden:
        keys["head_dim"] = channels
    if flags.on("--qk-layernorm"):
        keys["qk_norm"] = True
    return {**keys, **given}


def _required(flags: Flags, flag: str) -> int:
    value = flags.number(flag)
    if value is None:
        raise ConfigError(f"{flags.where}: {flag} is missing, so the model's shape is not known. Add it.")
    return value


def _norm(flags: Flags) -> str:
    """Megatron-LM writes RMSNorm and Megatron-DeepSpeed rmsnorm; layer norm where it is absent."""
    kind = (flags.text("--normalization") or "layernorm").lower()
    if kind not in ("rmsnorm", "layernorm"):
        raise ConfigError(f"{flags.where}: --normalization is {kind}. Known are LayerNorm and RMSNorm.")
    return kind


def _kv_heads(flags: Flags, heads: int) -> int:
    """Megatron-LM's two flags, or Megatron-DeepSpeed's one."""
    if theirs := flags.number("--num-key-value-heads"):
        return theirs
    groups = flags.number("--num-query-groups")
    return (groups or heads) if flags.on("--group-query-attention") else heads


def _biases(flags: Flags) -> Keys:
    qkv = flags.on("--add-qkv-bias")
    if flags.on("--disable-bias-linear"):
        return {"qkv_bias": True} if qkv else {}
    return {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def _positions(flags: Flags) -> Keys:
    kind = flags.text("--position-embedding-type")
    if flags.on("--use-rotary-position-embeddings"):
        kind = "rope"
        flags.note("--use-rotary-position-embeddings", "--position-embedding-type rope is written")
    longest = _required(flags, "--max-position-embeddings")
    if kind in (None, "learned_absolute"):
        return {"position": "learned", "max_positions": longest}
    if kind != "rope":
        raise ConfigError(
            f"{flags.where}: --position-embedding-type is {kind}. Known are learned_absolute, rope."
        )
    return {"max_positions": longest, "rope_theta": float(flags.number("--rotary-base") or 10000)}


def _vocab(flags: Flags, tp: int) -> int:
    """Rows of the table: as given, or the tokenizer's entries padded to a multiple of 128 tp."""
    if padded := flags.number("--padded-vocab-size"):
        return padded
    multiple = (flags.number("--make-vocab-size-divisible-by") or 128) * tp
    tokenizer = flags.left.get("--tokenizer-type", ("",))[0]
    entries = flags.number("--vocab-size") or _VOCABULARIES.get(tokenizer)
    if entries is None:
        raise ConfigError(
            f"{flags.where}: the vocabulary is the tokenizer's and stands in no flag. Add it, such as: "
            "model.components.llm.vocab=32000 (rows of the table, padding included)"
        )
    rows = -(-entries // multiple) * multiple
    flags.note("--vocab-size", f"{entries} entries, padded to {rows} rows (a multiple of {multiple})")
    return rows


def _experts(flags: Flags, ffn: int) -> Keys:
    count = flags.number("--num-experts") or 1
    if count == 1:  # Megatron-DeepSpeed's way to write a dense model
        return {}
    width = flags.number("--moe-ffn-hidden-size") or ffn
    experts: Keys = {"count": count, "top_k": flags.number("--moe-router-topk") or 2, "ffn": width}
    if shared := flags.number("--moe-shared-expert-intermediate-size"):
        experts["shared_ffn"] = shared
    if flags.on("--moe-router-enable-expert-bias"):
        experts["router_bias"] = True
    if groups := flags.number("--moe-router-num-groups"):
        experts |= {"n_group": groups, "topk_group": flags.number("--moe-router-group-topk") or 1}
    if factor := flags.real("--moe-router-topk-scaling-factor"):
        experts["routed_scaling_factor"] = factor
    if frequency := flags.text("--moe-layer-freq"):
        experts |= _dense_layers(flags, frequency)
    return {"experts": experts}


def _dense_layers(flags: Flags, frequency: str) -> Keys:
    """`([0]*3+[1]*58)`: three dense layers, then experts; other patterns are not modelled."""
    compact = frequency.replace(" ", "").strip("()")
    if compact in ("1", "[1]"):
        return {}
    first, plus, _ = compact.partition("+[1]")
    number = first.removeprefix("[0]").removeprefix("*") or "1"
    if not plus or not first.startswith("[0]") or not number.isdigit():
        raise ConfigError(
            f"{flags.where}: --moe-layer-freq is {frequency}. Known are 1 and ([0]*N+[1]*M): dense layers first."
        )
    return {"dense_layers": int(number)}


def _latent(flags: Flags) -> Keys:
    if not flags.on("--multi-latent-attention"):
        return {}
    return {
        "mla": {
            "q_lora_rank": flags.number("--q-lora-rank") or 0,
            "kv_lora_rank": flags.number("--kv-lora-rank") or 32,
            "qk_nope_head_dim": flags.number("--qk-head-dim") or 128,
            "qk_rope_head_dim": flags.number("--qk-pos-emb-head-dim") or 64,
            "v_head_dim": flags.number("--v-head-dim") or 128,
        }
    }
