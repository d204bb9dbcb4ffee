"""What Megatron's scripts do unless told otherwise: from a record's flags, where it has some, and from its
notes.

`flags` of a record are arguments of Megatron-LM's pretrain scripts as the run's own configuration has them,
without the dashes. A phrase such as "attention-backend unfused" in the notes says the same.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks import habits
from benchmarks.records import Record
from benchmarks.stages import by_flags
from dslaunch.hardware.software import flagged

_PHRASE = re.compile(r"\b(attention-backend|transformer-impl) (\w+)")
_GPT2_VOCABULARY, _BERT_VOCABULARY = 50257, 30522
"""Tokens of GPT2BPETokenizer and BertWordPieceLowerCase, the tokenizers of the scripts' examples and
tests."""
_MULTIPLE = 128
"""--make-vocab-size-divisible-by; times tp (megatron/training/tokenizer, 0.16)."""


_MIXER = {
    "mamba-head-dim": "head_dim", "mamba-state-dim": "state", "mamba-num-groups": "groups",
}  # fmt: skip
RECOMPUTES: tuple[dict[str, str], ...] = (
    {"recompute": "selective", "recompute_detail": "core_attn layernorm moe_act mla_up_proj"},
    {"recompute": "selective", "recompute_detail": "core_attn layernorm moe_act mla_up_proj mlp"},
    {"recompute": "full"},
)
"""What recipes recompute, from the cheapest on: keys of a record."""


def half_gradients(record: Record) -> bool:
    """Whether gradients are kept in 16 bits: by the flags, or in the recipes that NVIDIA measures its tables
    with (NVIDIA-NeMo/Megatron-Bridge: scripts/performance, grad_reduce_in_fp32; NeMo 24: grad_sync_dtype)."""
    measured = habits.is_recipe(record) and record.framework.endswith("Megatron-Core")
    return bool(flags(record).get("grad-reduce-in-bf16")) or measured


def is_script(record: Record) -> bool:
    """Whether the defaults of Megatron-LM's own arguments hold, not a recipe's."""
    return record.framework.startswith("Megatron-LM")


def flags(record: Record) -> dict[str, Any]:
    """Arguments that the run is known to have been given."""
    given: dict[str, Any] = (record.model_extra or {}).get("flags") or {}
    return dict(_PHRASE.findall(record.notes or "")) | given


def is_classic(record: Record) -> bool:
    """Whether Megatron's arguments have their defaults where nothing is known: biases, LayerNorm, learned
    positions, dropout. So it is where the flags are known, and for a GPT or BERT without newer parts."""
    newer = record.model.gated_mlp or record.model.mla
    return is_script(record) and ("flags" in (record.model_extra or {}) or not newer)


def software(record: Record) -> dict[str, Any]:
    """Fields of `dslaunch.hardware.software.Software` that Megatron's arguments decide."""
    given = flags(record)
    notes = record.notes or ""
    dropout = given.get("hidden-dropout", 0.1 if is_classic(record) else 0.0)
    return {
        "dropout": float(dropout) > 0,
        "flash_attention": _flash(record, given),
        "recompute_modules": tuple(given.get("recompute-modules") or _modules(record)),
        "grouped_products": bool(given.get("moe-grouped-gemm", not given)),
        "balanced_routing": "force-balanced" in notes or "moe-pad-expert-input-to-capacity" in given,
        "deterministic": bool(given.get("deterministic-mode")) or "deterministic mode" in notes,
        "loss": _loss(record, given),
        "fused_wgrad": not (
            given.get("no-gradient-accumulation-fusion") or "deterministic mode" in notes or _before_fusion(record)
        ),
        "alltoall_context": "CP comm a2a" in notes,
        "offloaded_modules": tuple(given.get("offload-modules") or ()),
        "half_moments": given.get("exp-avg-dtype") == "bf16",
        **_flagged(record, given),
    }


def _flagged(record: Record, given: dict[str, Any]) -> dict[str, Any]:
    """Scaling, weights and optimizer by the flags.

    Where they say nothing, weights of recipes are in 8 bits with one scale for a tensor or for each 32 values
    (NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/training/mixed_precision.py, fp8_param_gather; NeMo's
    fp8_params; NVIDIA/Megatron-LM: examples/llama), and an optimizer that a record has on the host is all there.
    """
    said = flagged("megatron", given)
    found: dict[str, Any] = {"fp8": said.fp8} if said.fp8 != "none" else {}
    recipe = habits.is_recipe(record) and "flags" not in (record.model_extra or {})
    found["narrow_weights"] = said.narrow_weights or (recipe and record.precision in ("fp8", "mxfp8"))
    away = (record.offload or "").startswith("optimizer") and not record.framework.startswith("Megatron-Deep")
    found |= {"offloaded_layers": said.offloaded_layers} if said.offloaded_layers else {}
    found["offloaded_states"] = said.offloaded_states or float(away)
    return {**found, "overlapped_step": said.overlapped_step, "wide_layers": said.wide_layers}


def _before_fusion(record: Record) -> bool:
    """Megatron-LM adds gradients up inside products since release 3.0, of 2022, which brought
    --no-gradient-accumulation-fusion; version 2 had kernels of their own for that."""
    return is_script(record) and (record.framework_version or "").startswith(("2020", "v2"))


def _flash(record: Record, given: dict[str, Any]) -> bool:
    """Megatron-DeepSpeed has it where --use-flash-attn is given (deepspeedai/Megatron-DeepSpeed:
    megatron/arguments.py), Megatron-LM unless another backend is."""
    if record.flash_attention is not None:
        return record.flash_attention
    if record.framework == "Megatron-DeepSpeed":
        return "use-flash-attn" in given
    return given.get("attention-backend") != "unfused" and given.get("transformer-impl") != "local"


def decoder(record: Record) -> dict[str, Any]:
    """Keys of the model that Megatron's arguments decide."""
    if not is_classic(record):
        return {}
    given = flags(record)
    biased = not given.get("disable-bias-linear") and not (record.model.moe and "flags" not in given)
    return {
        "qkv_bias": biased,
        "out_bias": biased,
        "mlp_bias": biased,
        "norm": "rmsnorm" if given.get("normalization") == "RMSNorm" else "layernorm",
        "position": "learned" if given.get("position-embedding-type", "learned") == "learned" else "rope",
    }


def vocabulary(record: Record) -> int:
    """Rows of the table, padding included, of the tokenizer that the examples use."""
    multiple = _MULTIPLE * (record.tp or 1)
    tokens = _BERT_VOCABULARY if record.model.name.lower().startswith("bert") else _GPT2_VOCABULARY
    return -(-tokens // multiple) * multiple


def _loss(record: Record, given: dict[str, Any]) -> str:
    """Megatron-Bridge's and NeMo's recipes take Transformer Engine's loss; Megatron-LM's own fusion is
    compiled."""
    if given.get("cross-entropy-loss-fusion"):
        return "fused" if given.get("cross-entropy-fusion-impl") == "te" else "compiled"
    recipes = any(name in record.framework for name in ("Bridge", "NeMo"))
    return "fused" if recipes or "cross-entropy fusion" in (record.notes or "") else "plain"


def completed(record: Record) -> Record:
    """With what its flags say of its stages, and of a hybrid's layers."""
    return _hybrid(_staged(record))


def _staged(record: Record) -> Record:
    extra, pp, layers = record.model_extra or {}, record.pp or 1, record.model.layers or 0
    if extra.get("layers_per_stage") or pp == 1:
        return record
    stages, virtual = by_flags(flags(record), layers, pp)
    more: dict[str, Any] = {"layers_per_stage": list(stages), "vpp": virtual or record.vpp} if stages else {}
    return Record.model_validate(record.model_dump() | more) if more else record


def _hybrid(record: Record) -> Record:
    """With what a hybrid's flags say of its layers: `MEM*|EM-M/*E/*E` are two stages, and two further layers.

    Defaults of the mixer are those of megatron/core/transformer/transformer_config.py, 0.16.
    """
    given = flags(record)
    written = given.get("hybrid-layer-pattern") or given.get("hybrid-override-pattern")
    if not written:
        return record
    main, *further = str(written).split("/")
    parts, pp = main.split("|"), record.pp or 1
    hidden = record.model.hidden or 0
    mamba = {"heads": given.get("mamba-num-heads", 2 * hidden // 64)}
    mamba |= {key: given[flag] for flag, key in _MIXER.items() if flag in given}
    pattern = "".join(parts)
    shape = {"pattern": pattern, "layers": len(pattern), "mtp_pattern": "".join(further[:1]), "mamba": mamba}
    stages = [sum(len(part) for part in parts[stage::pp]) for stage in range(pp)] if len(parts) > 1 else []
    more = {"layers_per_stage": stages, "vpp": len(parts) // pp} if stages else {}
    return Record.model_validate(record.model_dump() | more | {"model": record.model.model_dump() | shape})


def lacking(record: Record) -> str | None:
    """What the record does not say of a model that is more than a decoder; None where it says enough."""
    name = record.model.name.lower()
    if record.framework.startswith("Megatron") and any(word in name for word in ("llava", "mimo")):
        return "model.vision"
    return None


def _modules(record: Record) -> list[str]:
    """Modules of selective recompute that the record names in its detail, such as `core_attn,mlp`."""
    if record.recompute != "selective":
        return []
    known = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts")
    return [word for word in re.findall(r"\w+", record.recompute_detail or "") if word in known]
