"""Bands around predictions: within which most published runs of a kind have been."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.errors import Error

ALLOCATOR = ("allocated", "reserved")
"""Kinds of memory figures that PyTorch's allocator reports."""
_SHARE = 0.9


def bands(found: Sequence[Error]) -> dict[str, dict[str, dict[str, float]]]:
    """By figure (memory, time) and software family: shares of the prediction.

    `low` and `high` leave 5 % of the runs outside on either side, each source weighing as much as any other:
    measured is expected in [low, high] x predicted; `runs` and `sources` say how many they rest on. Memory as the
    allocator reports it; time without the tests of small models that share machines.
    """
    result: dict[str, dict[str, dict[str, float]]] = {}
    for kind in ("memory", "time"):
        of_kind = [error for error in found if error.kind == kind and _counts(error)]
        families = sorted({error.family for error in of_kind})
        result[kind] = {family: _band([e for e in of_kind if e.family == family]) for family in families}
    return result


def _counts(error: Error) -> bool:
    """Whether a run is one as users have them, and fully described."""
    if error.kind == "memory" and error.quantity not in ALLOCATOR:
        return False
    return error.record.quality == "A" and not (error.kind == "time" and "ci" in error.record.tags)


def _band(errors: Sequence[Error]) -> dict[str, float]:
    sources: dict[str, int] = {}
    for error in errors:
        sources[error.record.source.title] = sources.get(error.record.source.title, 0) + 1
    ratios = sorted((e.measured / e.predicted, 1 / sources[e.record.source.title]) for e in errors)
    tail = (1 - _SHARE) / 2
    return {
        "low": min(1.0, round(_weighted(ratios, tail), 3)),
        "high": max(1.0, round(_weighted(ratios, 1 - tail), 3)),
        "runs": len(ratios),
        "sources": len(sources),
    }


def _weighted(ratios: Sequence[tuple[float, float]], share: float) -> float:
    """The value below which `share` of the weight lies."""
    below, total = 0.0, sum(weight for _, weight in ratios)
    for value, weight in ratios:
        below += weight
        if below >= share * total:
            return value
    return ratios[-1][0]
