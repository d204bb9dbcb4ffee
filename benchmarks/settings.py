"""A published run as the planner sees it: configuration, engine, layout, and what software ran.

Nothing here predicts: what a record does not say is filled in by what its framework does unless told otherwise,
each with the reason beside it. Where a fact is missing without which nobody could predict, the record is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from benchmarks.records import Record
from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.hardware.software import Family, Fp8, Software
from dslaunch.paths import data_root
from dslaunch.plan.case import Case, cases
from dslaunch.schema.config import RunConfig

_GPU_FILES = {
    "A100": "A100-80GB", "B200": "B200-180GB", "B300": "B300-270GB", "GB200": "GB200-NVL72",
    "GB300": "GB300-NVL72", "V100-32GB": "V100-32GB",
}  # fmt: skip
"""Cluster files of the GPU types whose file has another name."""
_ADAPTERS = ("lora", "qlora", "lora_llm", "adalora", "adapter", "boft", "bone")


class Missing(Exception):
    """A fact that the record lacks and that nobody could guess."""


@dataclass(frozen=True)
class Setting:
    """What the ledgers need of a run."""

    record: Record
    config: RunConfig
    cases: dict[str, Case]


def setting(record: Record) -> Setting:
    """The run as the planner sees it.

    Raises:
        Missing: a fact without which nobody could predict; says which.
    """
    engine = engine_of(record)
    config = RunConfig.model_validate(_config(record, engine))
    layouts = {name: _layout(record, component.layers) for name, component in _layered(config)}
    accum = engine.grad_accum(config.training.precision, next(iter(layouts.values())).num_microbatches > 1)
    return Setting(record, config, cases(config, engine, layouts, accum, software_of(record)))


def engine_of(record: Record) -> Engine:
    """The engine that a framework is, by its name."""
    name = record.framework.lower()
    if "megatron-deepspeed" in name:
        return ENGINES["megatron_deepspeed" if record.zero_stage != 3 else "deepspeed"]
    if any(word in name for word in ("megatron", "nemo")) and record.zero_stage != 3:
        return ENGINES["megatron"]
    if "deepspeed" in name or "hf/deepspeed" in name:
        return ENGINES["deepspeed"]
    return ENGINES["torch"]


def family_of(record: Record) -> Family:
    """Whose layers ran."""
    name = record.framework.lower()
    if any(word in name for word in ("megatron", "nemo")):
        return "megatron"
    if any(word in name for word in ("hf", "swift", "qlora", "deepspeed")):
        return "transformers"
    return "torch"


def software_of(record: Record) -> Software:
    """Habits of the program that ran."""
    return Software(
        family=family_of(record),
        flash_attention=record.flash_attention is not False,
        fp8=_fp8(record.precision or ""),
        half_states=record.framework == "torchtune",
    )


def _fp8(precision: str) -> Fp8:
    if precision in ("mxfp8", "nvfp4"):
        return "mxfp8" if precision == "mxfp8" else "nvfp4"
    return "tensorwise" if precision == "fp8" else "none"


def _layered(config: RunConfig) -> list[tuple[str, Any]]:
    return list(config.model.components.items())


def _needed(value: Any, what: str) -> Any:
    if value is None:
        raise Missing(what)
    return value


def _config(record: Record, engine: Engine) -> dict[str, Any]:
    """The configuration, in the schema's own words."""
    tokens = _needed(record.seq_len, "seq_len")
    precision = record.precision if record.precision in ("fp16", "fp32") else "bf16"
    return {
        "name": "run",
        "model": {"name": "model", "components": {"llm": _decoder(record)}},
        "cluster": _cluster(record),
        "training": {
            "global_batch": _global_batch(record), "seq_len": tokens, "precision": precision, "steps": 1000,
            "optimizer": {"lr": 1e-4},
            "sequence_parallel": bool(record.sequence_parallel),
            "schedule": "interleaved" if (record.vpp or 1) > 1 else "1f1b",
        },
        "strategy": {"name": "layouts", "sharding": _sharding(record, engine)},
        "engine": {"name": engine.name},
    }  # fmt: skip


def _sharding(record: Record, engine: Engine) -> str:
    if engine.name != "torch":
        return "zero"
    return "fsdp2" if record.zero_stage == 3 else "ddp"


def _decoder(record: Record) -> dict[str, Any]:
    shape = record.model
    for key in ("layers", "hidden", "heads", "ffn_hidden"):
        _needed(getattr(shape, key), f"model.{key}")
    heads = shape.heads
    mla = shape.mla if isinstance(shape.mla, dict) else None
    result: dict[str, Any] = {
        "arch": "decoder",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": heads,
        "kv_heads": heads if mla else shape.kv_heads or heads,
        "head_dim": shape.head_dim,
        "ffn": shape.ffn_hidden,
        "vocab": shape.vocab or 51200,
        "tied_embeddings": _tied(record),
        "gated_mlp": bool(shape.gated_mlp),
        "norm": "rmsnorm" if shape.gated_mlp else "layernorm",
        "position": "learned" if shape.learned_pos_emb else "rope",
        "max_positions": record.seq_len,
        "mla": mla,
        "mtp_layers": shape.mtp_layers or 0,
    }
    if shape.moe:
        moe = shape.moe
        result["experts"] = {
            "count": moe.num_experts, "top_k": moe.topk, "ffn": moe.moe_ffn, "shared_ffn": moe.shared_ffn or 0,
            "dense_layers": moe.dense_layers or 0,
        }  # fmt: skip
    if record.category in _ADAPTERS:
        result |= {"train": "qlora" if record.category == "qlora" else "lora", "lora": {"rank": 8}}
    return result


def _tied(record: Record) -> bool:
    shape = record.model
    if shape.tied_embeddings is not None:
        return shape.tied_embeddings
    return not shape.untied_embeddings if shape.untied_embeddings is not None else not shape.gated_mlp


@lru_cache(maxsize=64)
def _cluster_file(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load((data_root() / "conf" / "cluster" / f"{name}.yaml").read_text("utf-8"))
    for parent in raw.pop("defaults", []):
        if parent != "_self_":
            raw = {**_cluster_file(parent), **raw}
    return raw


def _cluster(record: Record) -> dict[str, Any]:
    kind = _needed(record.gpu.type, "gpu.type")
    raw = dict(_cluster_file(_GPU_FILES.get(kind, kind)))
    world = world_size(record)
    slots = min(record.gpus_per_node or raw["node"]["gpus"], world, raw["node"]["gpus"])
    while world % slots:
        slots -= 1
    return {**raw, "nodes": world // slots, "gpus_per_node": slots}


def world_size(record: Record) -> int:
    """GPUs of the run."""
    degrees = (record.tp or 1) * (record.pp or 1) * (record.cp or 1)
    return record.n_gpus or degrees * (record.dp or 1)


def _replicas(record: Record) -> int:
    degrees = (record.tp or 1) * (record.pp or 1) * (record.cp or 1)
    return record.dp or max(1, world_size(record) // degrees)


def _micro_batch(record: Record) -> int:
    if record.micro_batch is not None:
        return record.micro_batch
    if record.global_batch is not None and record.global_batch == _replicas(record):
        return 1
    raise Missing("micro_batch")


def _global_batch(record: Record) -> int:
    return record.global_batch or _micro_batch(record) * _replicas(record)


def _layout(record: Record, layers: int) -> Layout:
    dp, pp = _replicas(record), record.pp or 1
    micro = _micro_batch(record)
    base, more = divmod(layers, pp)
    return Layout(
        tp=record.tp or 1, pp=pp, vpp=record.vpp or 1, cp=record.cp or 1, ep=record.ep or 1, dp=dp,
        zero=_zero(record),
        offload=_offload(record),
        recompute=_recompute(record),
        micro_batch=micro,
        num_microbatches=max(1, _global_batch(record) // (micro * dp)),
        rank_offset=0,
        layers_per_stage=tuple(base + (stage < more) for stage in range(pp)),
    )  # fmt: skip


def _zero(record: Record) -> int:
    if record.zero_stage is not None:
        return record.zero_stage
    return int(bool(record.distributed_optimizer))


def _offload(record: Record) -> str:
    words = record.offload or "none"
    if "params" in words:
        return "cpu_params"
    return "cpu" if "optimizer" in words or "deepspeed" in words else "none"


def _recompute(record: Record) -> str:
    words = record.recompute or "none"
    return "full" if words.startswith("full") else words
