"""Which names the files of a rendering have."""

from __future__ import annotations

import re
from collections.abc import Iterable

REQUIRED = frozenset({"env.sh", "job.sbatch", "launch.sh", "plan.json", "rank.sh"})
"""Files of every rendering."""
_RENDERED = re.compile(
    r"env\.sh|job\.sbatch|launch\.sh|plan\.json|rank\.sh|prediction\.json|ds_config(\..+)?\.json|megatron_args\.txt"
    r"|accelerate\.yaml|torch\.json|hf_args\.json|hostfile|ds_env|kubernetes\.yaml|preflight\.json|blueprint\.json|stage\.sh"
    r"|gpus\.py|profiled\.py|cores\.py"
)


def left_out(listed: Iterable[str], present: Iterable[str]) -> list[str]:
    """Names that a manifest which lists `listed` should list too, sorted: those of every rendering, and those of
    the files beside it (`present`) that only a rendering writes."""
    expected = REQUIRED | {name for name in present if _RENDERED.fullmatch(name)}
    return sorted(expected - set(listed))


def is_rendered(name: str) -> bool:
    """Whether a rendering writes a file of this name, its manifest aside."""
    return _RENDERED.fullmatch(name) is not None
