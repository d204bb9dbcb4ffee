"""A published run as the planner sees it: configuration, engine, layout, and what software ran.

Nothing here predicts: what a record does not say is filled in by what its framework does unless told otherwise,
each with the reason beside it. Where a fact is missing without which nobody could predict, the record is refused.
An extra key of a record, `software`, holds fields of `dslaunch.hardware.software.Software` that its source tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import yaml

from benchmarks import habits, known, megatron, torch_family
from benchmarks.records import Record, replicas, world_size
from benchmarks.schedules import schedule
from dslaunch.engines.base import Engine
from dslaunch.engines.layout import Layout
from dslaunch.engines.registry import ENGINES
from dslaunch.hardware.software import Family, Software
from dslaunch.paths import data_root
from dslaunch.plan.case import Case, cases
from dslaunch.plan.memory import overhead_gib, reserved_gib
from dslaunch.plan.schedules import FOLDED
from dslaunch.schema.config import RunConfig

_GPU_FILES = {
    "A100": "A100-80GB", "B200": "B200-180GB", "B300": "B300-270GB", "GB200": "GB200-NVL72",
    "GB300": "GB300-NVL72", "V100-32GB": "V100-32GB", "H100-96GB": "H100-80GB",
}  # fmt: skip
"""Cluster files of the GPU types whose file has another name."""
_ADAPTERS = ("lora", "qlora", "lora_llm", "adalora", "adapter", "boft", "bone")


class Missing(Exception):  # noqa: N818  a record is incomplete, no program is at fault
    """A fact that the record lacks and that nobody could guess."""


@dataclass(frozen=True)
class Setting:
    """What the ledgers need of a run."""

    record: Record
    config: RunConfig
    cases: dict[str, Case]


def setting(record: Record) -> Setting:
    """The run as the planner sees it.

    A recipe's author turned on as much recompute as the run needed: where the record does not say how much, it is
    the least that fits.

    Raises:
        Missing: a fact without which nobody could predict; says which.
    """
    record = torch_family.completed(known.completed(megatron.completed(record)))
    if lacks := megatron.lacking(record):
        raise Missing(lacks)
    found = _setting(record)
    if record.recompute is not None or not habits.is_recipe(record):
        return found
    for change in megatron.RECOMPUTES:
        if _fits(found):
            break
        found = _setting(record.model_copy(update=change))
    return replace(found, record=record)


def _fits(run: Setting) -> bool:
    capacity = run.config.cluster.gpu.memory_gib - overhead_gib(
        run.cases["llm"], run.config.cluster.world_size
    )
    return all(
        sum(reserved_gib(case, stage) for case in run.cases.values()) < capacity
        for stage in range(run.cases["llm"].layout.pp)
    )


def _setting(record: Record) -> Setting:
    engine = engine_of(record)
    config = RunConfig.model_validate(_config(record, engine))
    layouts = {name: _layout(record, component.layers) for name, component in _layered(config)}
    accum = engine.grad_accum(config.training.precision, next(iter(layouts.values())).num_microbatches > 1)
    if engine.name == "deepspeed":
        accum = (
            config.training.precision
        )  # DeepSpeed's default, data_types.grad_accum_dtype: the model's own type
    if megatron.half_gradients(record):
        accum = "bf16"
    return Setting(record, config, cases(config, engine, layouts, accum, software_of(record)))


def engine_of(record: Record) -> Engine:
    """The engine that a framework is, by its name."""
    name = record.framework.lower()
    if "megatron-deepspeed" in name:
        return ENGINES["megatron_deepspeed" if record.zero_stage != 3 else "deepspeed"]
    if any(word in name for word in ("megatron", "nemo")) and record.zero_stage != 3:
        return ENGINES["megatron"]
    if torch_family.without_deepspeed(record):
        return ENGINES["torch"]
    if "deepspeed" in name or "hf/deepspeed" in name:
        return ENGINES["deepspeed"]
    if torch_family.is_torchtitan(record):
        return replace(ENGINES["torch"], sequence_parallel=True)
    return ENGINES["megatron" if torch_family.has_own_grid(record) else "torch"]


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
    found = Software(
        family=family_of(record),
        flash_attention=record.flash_attention is not False,
        fp8=torch_family.fp8(record.precision or ""),
    )
    found = replace(found, **habits.software(record))
    family = megatron if found.family == "megatron" else torch_family
    found = replace(found, **family.software(record))
    if torch_family.every_second_layer(record):
        found = replace(found, recompute_layers=-(-(record.model.layers or 0) // 2))
    said: dict[str, Any] = (record.model_extra or {}).get("software") or {}
    more: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in said.items()}
    return replace(found, **more)


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
            "sequence_parallel": habits.sequence_parallel(record) or torch_family.is_torchtitan(record),
            "overlap_comm": habits.overlaps(record),
            "schedule": schedule(record),
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
        "vocab": shape.vocab or (megatron.vocabulary(record) if megatron.is_script(record) else 51200),
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
            "count": _needed(moe.num_experts, "model.moe.num_experts"),
            "top_k": _needed(moe.topk, "model.moe.topk"), "ffn": _needed(moe.moe_ffn, "model.moe.moe_ffn"),
            "shared_ffn": moe.shared_ffn or 0, "dense_layers": moe.dense_layers or 0, "latent": moe.latent or 0,
        }  # fmt: skip
    if shape.pattern:
        result |= {"pattern": shape.pattern, "mtp_pattern": shape.mtp_pattern or "", "mamba": shape.mamba}
        result["norm"] = "rmsnorm"
    result |= megatron.decoder(record)
    if record.category in _ADAPTERS:
        train = "qlora" if record.category == "qlora" else "lora"
        result |= {"train": train, "lora": torch_family.adapters(record)}
        result["train_ends"] = ("stem", "tail") if torch_family.ends_train(record) else ()
    return result


def _tied(record: Record) -> bool:
    shape = record.model
    if shape.tied_embeddings is not None:
        return shape.tied_embeddings
    return not shape.untied_embeddings if shape.untied_embeddings is not None else not shape.gated_mlp


@lru_cache(maxsize=64)
def _cluster_file(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(
        (data_root() / "conf" / "cluster" / f"{name}.yaml").read_text("utf-8")
    )
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
    return {**habits.cluster(record, raw), "nodes": world // slots, "gpus_per_node": slots}


def _global_batch(record: Record) -> int:
    """One micro-batch where the record does not say; in a pipeline as many as leave little of its bubble."""
    rounds = 8 * (record.pp or 1) if (record.pp or 1) > 1 else torch_family.rounds(record)
    return record.global_batch or torch_family.micro_batch(record) * replicas(record) * rounds


def _layout(record: Record, layers: int) -> Layout:
    dp, pp = replicas(record), record.pp or 1
    micro = torch_family.micro_batch(record)
    return Layout(
        tp=record.tp or 1, pp=pp, vpp=record.vpp or _chunks(record), cp=record.cp or 1, ep=record.ep or 1, dp=dp,
        zero=_zero(record),
        offload=_offload(record),
        recompute=_recompute(record),
        micro_batch=micro,
        num_microbatches=max(1, _global_batch(record) // (micro * dp)),
        rank_offset=0,
        layers_per_stage=_stages(record) or _with_ends(layers, pp),
        expert_tp=_expert_tp(record),
        shard_size=_shard_size(record, dp * (record.cp or 1)),
    )  # fmt: skip


def _chunks(record: Record) -> int:
    """Virtual stages of a rank where none are printed: first and last parts of the model in a folded pipeline."""
    return 2 if schedule(record) in FOLDED else 1


def _with_ends(layers: int, pp: int) -> tuple[int, ...]:
    """Equal stages; where they cannot be, embedding and loss count as a layer each (Megatron's
    account-for-embedding-in-pipeline-split, BLOOM's partition); else the first have more."""
    if layers % pp and (layers + 2) % pp == 0 and pp > 1:
        each = (layers + 2) // pp
        return (each - 1, *[each] * (pp - 2), each - 1)
    base, more = divmod(layers, pp)
    return tuple(base + (stage < more) for stage in range(pp))


def _stages(record: Record) -> tuple[int, ...]:
    """Layers of each pipeline stage, where the record says them."""
    return tuple((record.model_extra or {}).get("layers_per_stage") or ())


def _shard_size(record: Record, ranks: int) -> int | None:
    """Ranks that share the optimizer's states, where Megatron has several such groups."""
    instances = megatron.flags(record).get("num-distributed-optimizer-instances", 1)
    return ranks // instances if instances > 1 else None


def _expert_tp(record: Record) -> int | None:
    """tp in Megatron-LM's scripts unless told otherwise; where experts would not fit beside one another, and in
    recipes, which all set it, one."""
    tp = record.tp or 1
    if record.etp is not None or tp == 1 or record.model.moe is None:
        return record.etp
    fits = world_size(record) // (record.pp or 1) % ((record.ep or 1) * tp) == 0
    return None if fits and megatron.is_script(record) else 1


def _zero(record: Record) -> int:
    if record.zero_stage is not None:
        return record.zero_stage
    shards = (
        habits.is_recipe(record) if record.distributed_optimizer is None else record.distributed_optimizer
    )
    return int(shards)


def _offload(record: Record) -> str:
    words = record.offload or "none"
    if "params" in words:
        return "cpu_params"
    return "cpu" if "optimizer" in words or "deepspeed" in words else "none"


def _recompute(record: Record) -> str:
    if torch_family.is_torchtitan(record):
        return torch_family.recompute(record)
    words = record.recompute or "none"
    return "full" if words.startswith("full") else words
