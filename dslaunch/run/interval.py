"""The best checkpoint interval, from what a run measured."""

from __future__ import annotations

import statistics
from pathlib import Path

from dslaunch.plan.interval import interval
from dslaunch.planfile import CheckpointInterval, Plan
from dslaunch.run.lines import Lines, number


def measured_interval(run_dir: Path, plan: Plan) -> CheckpointInterval | None:
    """From the medians of the run's own steps and checkpoints; None where it recorded none of either."""
    save_s = _median(run_dir / "checkpoints.jsonl", "save_time_s")
    step_s = _median(run_dir / "metrics.jsonl", "step_time_s")
    if save_s is None or step_s is None or not plan.supervision.node_mtbf_hours:
        return None
    return interval(save_s, plan.supervision.node_mtbf_hours, plan.cluster.nodes, step_s)


def _median(path: Path, figure: str) -> float | None:
    """Of the file's whole lines that have it: a program of the user's may write others."""
    values = [value for row in Lines(path).new() if (value := number(row.get(figure))) is not None]
    return statistics.median(values) if values else None
