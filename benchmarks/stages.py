"""Layers of each pipeline stage by a record's flags: Megatron's ways to say that stages are not alike.

Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build, and
pipeline_parallel_layer_layout.py beside it, core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""`(tt|)*3` is `tt|tt|tt|`, and `t*3` is `ttt`."""


def by_flags(flags: Mapping[str, Any], layers: int, pp: int) -> tuple[tuple[int, ...], int | None]:
    """(layers of each stage, virtual stages of each where that is said too); no layers where all are alike.

    A layout with a stage that has no layer of the decoder is passed over: the ledgers have none.
    """
    if layout := flags.get("pipeline-model-parallel-layout"):
        parts = written_out(str(layout))
        found = tuple(sum(part.count("t") for part in parts[stage::pp]) for stage in range(pp))
        known = len(parts) % pp == 0 and sum(found) == layers and min(found) > 0
        return (found, len(parts) // pp) if known else ((), None)
    first, last = (flags.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first or last:
        return _other_ends(layers, pp, first, last), None
    counted = [bool(flags.get(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]
    if any(counted) and (layers + sum(counted)) % pp == 0 and pp > 1:
        each = (layers + sum(counted)) // pp
        return (each - counted[0], *[each] * (pp - 2), each - counted[1]), None
    return (), None


def written_out(layout: str) -> list[str]:
    """Letters of each virtual stage: E embedding, t a layer, m one that predicts a further token, L the loss."""
    for repeated in _REPEATED:
        layout = re.sub(repeated, lambda found: found[1] * int(found[2]), layout.replace(",", ""))
    return layout.split("|")


def _other_ends(layers: int, pp: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """The stages between take what is left in equal parts, with an end of which nothing is said."""
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if between < 1 or rest % between:
        return ()
    each = rest // between
    ends = [each if end is None else end for end in (first, last)]
    return (ends[0], *[each] * (pp - 2), ends[1])
