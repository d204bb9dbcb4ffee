"""What many tests ask of the program again, worked out once for each process of the tests.

A plan follows from its configuration and tables alone, and is frozen: it is kept by what was given.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from dslaunch.hardware.efficiency import Tables
from dslaunch.plan import planner
from dslaunch.planfile import Plan, Prediction
from dslaunch.schema.config import RunConfig

_plan = planner.plan
_planned: dict[bytes, tuple[Plan, Prediction]] = {}


def remember() -> None:
    """Put the function below in the place of the program's own, before anything imports that by name."""
    planner.plan = plan


def plan(
    config: RunConfig, tables: Tables | None = None, accepted: Sequence[str] = ()
) -> tuple[Plan, Prediction]:
    """`dslaunch.plan.planner.plan`, whose results are frozen."""
    key = pickle.dumps((config, tables, tuple(accepted)))
    if key not in _planned:
        _planned[key] = _plan(config, tables, accepted)
    return _planned[key]
