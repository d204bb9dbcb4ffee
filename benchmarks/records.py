"""Published measurements, one record a run, in the form of data/published_runs.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

DATA = Path(__file__).parent / "data"
RUNS = DATA / "published_runs.json"
MENDS = DATA / "mends.yaml"
HOLDOUT = "holdout: first seen"
"""Tag of the records in data/holdout.json, which no rate is derived from."""


class _Part(BaseModel):
    """Null is unknown, as if the key were absent."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, row: Any) -> Any:
        return {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row


class Source(_Part):
    title: str = ""
    repo: str | None = None
    path: str | None = None
    locator: str | None = None


class Moe(_Part):
    num_experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    shared_ffn: int | None = 0
    dense_layers: int | None = None
    layer_freq: str | int | None = None
    latent: int | None = 0


class Shape(_Part):
    """A model's shape. None is unknown."""

    name: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    gated_mlp: bool | None = None
    moe: Moe | None = None
    mla: dict[str, int] | bool | None = None
    tied_embeddings: bool | None = None
    untied_embeddings: bool | None = None
    learned_pos_emb: bool | None = None
    mtp_layers: int | None = None
    vision: str | None = None
    mamba: dict[str, int] | None = None
    """Keys of `dslaunch.schema.layer.Mamba`."""
    pattern: str | None = None
    """A letter a layer, in Megatron's words: M, *, - or E."""
    mtp_pattern: str | None = None


class Gpu(_Part):
    type: str | None = None
    memory_gb: float | None = None


class Measured(_Part):
    tflops_per_gpu: float | None = None
    tflops_kind: str | None = None
    mfu: float | None = None
    hfu: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    samples_per_sec: float | None = None
    step_time_s: float | None = None
    peak_memory_gb: float | None = None
    peak_memory_unit: str | None = None
    peak_memory_kind: str | None = None
    memory_class: str | None = None
    steady_memory_gb: float | None = None
    oom: bool | None = None


class Record(_Part):
    """One run. `fits` stands in `tags` where it is known to have fitted."""

    id: str
    source: Source = Source()
    category: str = "pretrain"
    model: Shape = Shape()
    seq_len: int | None = None
    gpu: Gpu = Gpu()
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    interconnect: str | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    sequence_parallel: bool | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    zero_stage: int | None = None
    distributed_optimizer: bool | None = None
    fsdp: str | None = None
    offload: str | None = None
    recompute: str | None = None
    recompute_detail: str | None = None
    flash_attention: bool | None = None
    framework: str = ""
    framework_version: str | None = None
    measured: Measured = Measured()
    tags: tuple[str, ...] = ()
    notes: str | None = None
    quality: str = "C"


def read(file: Path, mends: Path | None = None) -> list[Record]:
    """The records of a file: a JSON list, or a JSON object a line.

    Args:
        mends: what is wrong or missing in single records, with the evidence; None mends nothing.

    Raises:
        ValueError: a record lacks its id or has a value of the wrong type; says which.
    """
    text = file.read_text(encoding="utf-8")
    raw = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    corrections = _corrections(mends) if mends else []
    return [_record(_mended(row, _corrected(str(row.get("id")), corrections))) for row in raw]


def published() -> list[Record]:
    """The published runs, mended."""
    return read(RUNS, MENDS)


def _record(row: dict[str, Any]) -> Record:
    try:
        return Record.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"record {row.get('id', '?')}: {where}: {first['msg']}") from error


def _corrections(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """(a record's id or a pattern of ids, dotted key -> value). The file holds a list of {records, set,
    evidence}."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    return [(name, entry["set"]) for entry in entries for name in entry["records"]]


def _corrected(name: str, corrections: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, changes in corrections:
        if name == pattern or ("*" in pattern and fnmatchcase(name, pattern)):
            found |= changes
    return found


def _mended(row: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(row))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = result
        for part in path:
            place = place[part]
        place[last] = value
    return result


def world_size(record: Record) -> int:
    """GPUs of the run."""
    degrees = (record.tp or 1) * (record.pp or 1) * (record.cp or 1)
    experts = (record.ep or 1) * (record.etp or 1) * (record.pp or 1)
    return record.n_gpus or max(degrees * (record.dp or 1), experts)


def replicas(record: Record) -> int:
    """Ranks along dp."""
    degrees = (record.tp or 1) * (record.pp or 1) * (record.cp or 1)
    return record.dp or max(1, world_size(record) // degrees)
