"""What a record leaves out and any reader would know: shapes of named public models, customs of GPT papers."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from benchmarks.records import DATA, Record, Shape, replicas

_SUFFIXES = re.compile(r"(-instruct(-\d+)?|-gptq-int4|-2507|-preview|-fp8|-hf|-v\d[\d.]*|-it|-base)+$")
_HEAD = 128
"""Width of an attention head in GPTs whose number of heads is not printed: that of arXiv:2104.04473, table 1, from
6.1 thousand hidden on."""

_PRETRAINING, _TUNING = 2048, 512
"""Tokens of a sample where no length is printed."""
_PASS = 8192
"""Tokens of a pass where no micro-batch is printed."""


def completed(record: Record) -> Record:
    """The record with its blanks filled in where that takes no guess about this run, or one that hardly matters.

    A GPU that is not named enters the memory by its size alone: an A100-80GB stands for it. A micro-batch that
    is not printed is 1 where the model is cut by pp, and otherwise fills a pass of 8,192 tokens, as far as the
    replica's share of the batch goes. Samples whose length is not printed have 2,048 tokens in pretraining, as
    GPT-3's (arXiv:2005.14165), and 512 in tuning: those of the usual instruction sets are shorter. Layers that
    are not printed follow from the parameters, the hidden width and the vocabulary.
    """
    changes: dict[str, Any] = {}
    if record.gpu.type is None and record.measured.peak_memory_gb is not None:
        changes["gpu"] = record.gpu.model_copy(update={"type": "A100-80GB"})
    tokens = record.seq_len or (_PRETRAINING if record.category == "pretrain" else _TUNING)
    if record.seq_len is None:
        changes["seq_len"] = tokens
    if record.micro_batch is None:
        changes["micro_batch"] = 1 if (record.pp or 1) > 1 else _micro_batch(record, tokens)
    shape = _shape(record.model)
    if shape is not record.model:
        changes["model"] = shape
    return record.model_copy(update=changes) if changes else record


def _micro_batch(record: Record, tokens: int) -> int:
    share = (record.global_batch or _PASS) // replicas(record)
    return next(number for number in range(max(1, _PASS // tokens), 0, -1) if share % number == 0 or number == 1)


def _shape(shape: Shape) -> Shape:
    if shape.layers is None:
        known = _shapes().get(_public_name(shape.name))
        if known:
            return Shape.model_validate({**shape.model_dump(), **known})
        if not (shape.hidden and shape.params_b and shape.vocab) or shape.gated_mlp or shape.moe:
            return shape
        layers = (shape.params_b * 1e9 - shape.vocab * shape.hidden) / (12 * shape.hidden**2)
        shape = shape.model_copy(update={"layers": round(layers)})
    changes: dict[str, Any] = {}
    if shape.hidden and shape.heads is None and not shape.gated_mlp:
        changes["heads"] = changes["kv_heads"] = _heads(shape.hidden)
    if shape.hidden and shape.ffn_hidden is None and not shape.gated_mlp:
        changes["ffn_hidden"] = 4 * shape.hidden
    return shape.model_copy(update=changes) if changes else shape


def _heads(hidden: int) -> int:
    """As many as leave each about the usual width, so that tp can cut them."""
    return next(n for n in range(hidden // _HEAD, 0, -1) if hidden % n == 0 and (n % 8 == 0 or n < 8))


def _public_name(name: str) -> str:
    """`Qwen/Qwen2.5-3B-Instruct` and `output/Qwen2.5-3B-Instruct/vx/checkpoint` are both `qwen2.5-3b`."""
    parts = name.lower().split("/")
    last = next((part for part in parts if re.search(r"\d", part)), parts[-1])
    return _SUFFIXES.sub("", last)


@lru_cache(maxsize=1)
def _shapes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "shapes.yaml").read_text(encoding="utf-8"))
    return found
