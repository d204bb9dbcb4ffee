"""The order of micro-batches that a record names: by a key of its own, by its flags, or in its words.

`pp_schedule` of a record is torchtitan's --parallelism.pipeline_parallel_schedule, or a paper's name.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.records import Record

_NAMES = {
    "gpipe": "gpipe", "loopedbfs": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved",
    "interleaved": "interleaved", "interleavedzerobubble": "zb-h1", "zb1p": "zb-h1", "zbh1": "zb-h1",
    "zb2p": "zb-h2", "zbh2": "zb-h2", "zbv": "zb-v", "zbvzerobubble": "zb-v", "vzb": "zb-v",
    "dualpipev": "dualpipe-v", "vhalf": "zb-v-half", "zbvhalf": "zb-v-half", "vmin": "zb-v-min",
    "zbvmin": "zb-v-min",
}  # fmt: skip
"""Values of training.schedule, by names in small letters without hyphens."""
_WORDS = re.compile(
    r"\b(interleaved-?zero-?bubble|zb-?(?:1p|2p|h1|h2|v(?:-?(?:half|min|zero-?bubble))?)|v-(?:half|min)|dualpipe-?v)\b"
)


def schedule(record: Record) -> str:
    """A value of training.schedule; interleaved or 1f1b by vpp where the record names none."""
    usual = "interleaved" if (record.vpp or 1) > 1 else "1f1b"
    if (record.pp or 1) == 1:
        return usual
    extra: dict[str, Any] = record.model_extra or {}
    if said := extra.get("pp_schedule"):
        return _NAMES.get(_plain(str(said)), usual)
    words = " ".join((record.framework, record.recompute_detail or "", record.notes or "")).lower()
    if found := _WORDS.search(words):
        return _NAMES[_plain(found[1])]
    return _flagged(extra.get("flags") or {}, record.pp or 1) or usual


def _plain(name: str) -> str:
    return re.sub(r"^schedule|[^a-z0-9]", "", name.lower())


def _flagged(flags: dict[str, Any], stages: int) -> str | None:
    """Megatron-DeepSpeed's flag (megatron/arguments.py), and those of sail-sg/zero-bubble-pipeline-parallelism
    (README.md: pending backward passes of as many stages make ZB1P, of twice as many ZB2P)."""
    if flags.get("enable-zbh1-pipeline"):
        return "zb-h1"
    if flags.get("zero-bubble-v-schedule"):
        return "zb-v"
    if flags.get("enable-zero-bubble"):
        pending = str(flags.get("zero-bubble-max-pending-backward", stages))
        return "zb-h2" if pending.isdecimal() and int(pending) >= 2 * stages else "zb-h1"
    return None
