"""How often to save: the interval that loses the least time to checkpoints and to work done again.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974), and J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22
(2006), equation 37: for C < 2 M, T = sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C, else T = M, where C
is the time of one checkpoint, M the mean time between failures of the whole job, T the time of work between two
checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dslaunch.planfile import CheckpointInterval, Plan
from dslaunch.schema.config import RunConfig

_HOUR_S = 3600.0


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints.

    Args:
        save_s: seconds that training stands still for one checkpoint.
        mtbf_s: mean seconds between failures of the job.
    """
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def interval(save_s: float, node_mtbf_hours: float, nodes: int, step_s: float) -> CheckpointInterval:
    """The best interval in whole steps, one at least.

    Args:
        node_mtbf_hours: mean hours between failures of one node; a job of `nodes` fails that many times as often.
    """
    job_hours = node_mtbf_hours / nodes
    best_s = best_interval_s(save_s, job_hours * _HOUR_S)
    steps = max(1, round(best_s / step_s))
    work_s = steps * step_s
    # Saving, and half an interval done again at each failure.
    lost = save_s / (work_s + save_s) + (work_s / 2 + save_s) / (job_hours * _HOUR_S)
    return CheckpointInterval(save_s, job_hours, best_s, steps, min(1.0, lost))


def planned_interval(config: RunConfig, step_s: float) -> CheckpointInterval | None:
    """The best interval of a plan; None where the time of a checkpoint was not measured yet."""
    save_s = config.checkpoint.save_seconds
    if save_s is None:
        return None
    return interval(save_s, config.cluster.mtbf_hours, config.cluster.node_count, step_s)


def with_interval(plan: Plan, config: RunConfig, best: CheckpointInterval | None) -> Plan:
    """The plan with the best interval, where checkpoint.every leaves it open."""
    if config.checkpoint.every != "auto":
        return plan
    assert best is not None
    return replace(plan, files=replace(plan.files, checkpoint_every=best.steps))
