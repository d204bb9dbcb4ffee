"""What many tests ask of the program again, worked out once for each process of the tests.

A plan follows from its configuration and tables alone, and is frozen: it is kept by what was given. Hydra reads
some twenty YAML files for each recipe, with Python's own reader: each is kept as it was parsed, until it changes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import IO, Any

from omegaconf import OmegaConf

from dslaunch.hardware.efficiency import Tables
from dslaunch.plan import planner
from dslaunch.planfile import Plan, Prediction
from dslaunch.schema.config import RunConfig

_plan = planner.plan
_planned: dict[bytes, tuple[Plan, Prediction]] = {}
_load = OmegaConf.load
_loaded: dict[tuple[str, int, int, int], bytes] = {}


def remember() -> None:
    """Put the functions below in the place of the program's own, before anything imports that by name."""
    planner.plan = plan
    OmegaConf.load = load  # type: ignore[method-assign,assignment]


def load(file: str | os.PathLike[str] | IO[Any]) -> Any:
    """`OmegaConf.load` of an open file, anew where it was written since."""
    if not hasattr(file, "fileno"):
        return _load(file)
    stat = os.fstat(file.fileno())
    key = (str(file.name), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if key not in _loaded:
        _loaded[key] = pickle.dumps(_load(file))
    return pickle.loads(_loaded[key])


def plan(
    config: RunConfig, tables: Tables | None = None, accepted: Sequence[str] = ()
) -> tuple[Plan, Prediction]:
    """`dslaunch.plan.planner.plan`, whose results are frozen."""
    key = pickle.dumps((config, tables, tuple(accepted)))
    if key not in _planned:
        _planned[key] = _plan(config, tables, accepted)
    return _planned[key]
