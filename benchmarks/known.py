"""What a record leaves out and any reader would know: shapes of named public models, customs of GPT papers."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from benchmarks.records import DATA, Record, Shape

_SUFFIXES = re.compile(r"(-instruct(-\d+)?|-2507|-preview|-fp8|-hf|-v\d[\d.]*|-it|-base)+$")
_HEAD = 128
"""Width of an attention head in GPTs whose number of heads is not printed: that of arXiv:2104.04473, table 1, from
6.1 thousand hidden on."""


def completed(record: Record) -> Record:
    """The record with its blanks filled in where that takes no guess about this run, or one that hardly matters.

    A GPU that is not named enters the memory by its size alone: an A100-80GB stands for it. A micro-batch that is
    not printed is 1 where the model is cut by pp or the sequence is long: nobody trains such a model with more.
    """
    changes: dict[str, Any] = {}
    if record.gpu.type is None and record.measured.peak_memory_gb is not None:
        changes["gpu"] = record.gpu.model_copy(update={"type": "A100-80GB"})
    if record.micro_batch is None and ((record.pp or 1) > 1 or (record.seq_len or 0) >= 8192):
        changes["micro_batch"] = 1
    shape = _shape(record.model)
    if shape is not record.model:
        changes["model"] = shape
    return record.model_copy(update=changes) if changes else record


def _shape(shape: Shape) -> Shape:
    if shape.layers is None:
        known = _shapes().get(_public_name(shape.name))
        return Shape.model_validate({**shape.model_dump(), **known}) if known else shape
    changes: dict[str, Any] = {}
    if shape.hidden and shape.heads is None and not shape.gated_mlp:
        changes["heads"] = changes["kv_heads"] = shape.hidden // _HEAD
    if shape.hidden and shape.ffn_hidden is None and not shape.gated_mlp:
        changes["ffn_hidden"] = 4 * shape.hidden
    return shape.model_copy(update=changes) if changes else shape


def _public_name(name: str) -> str:
    """`Qwen/Qwen2.5-3B-Instruct` and `output/Qwen2.5-3B-Instruct/vx/checkpoint` are both `qwen2.5-3b`."""
    parts = name.lower().split("/")
    last = next((part for part in parts if re.search(r"\d", part)), parts[-1])
    return _SUFFIXES.sub("", last)


@lru_cache(maxsize=1)
def _shapes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "shapes.yaml").read_text(encoding="utf-8"))
    return found
