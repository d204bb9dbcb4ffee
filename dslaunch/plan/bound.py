"""What no layout's step is shorter than, known before its ledgers: what tells a search where not to look.

A step of p stages takes no less than all stages' seconds dealt out evenly. For the whole of a component these are
no more than for its stages added up: computation and messages of layers add, what computation hides of messages
does too at best, and the wait for the host is that of a sum, which is no longer than the waits of its parts.
"""

from __future__ import annotations

from dataclasses import replace

from dslaunch.hardware.efficiency import Tables
from dslaunch.plan.case import Case
from dslaunch.plan.compute import speeds, whole_spent
from dslaunch.plan.schedules import SPLIT
from dslaunch.plan.time import Known, micro_batch_s


def undivided_s(case: Case, tables: Tables, known: Known) -> float:
    """Seconds that all stages of a component take of a micro-batch, at least, however many they are.

    Left out are what runs again, sends between stages, and what is done once a step.
    """
    layout = case.layout
    if case.lowest_layer:  # gradients reach another share of each stage
        return case.correction(tables).time * whole_spent(case, speeds(case, tables)).forward
    layers = (sum(layout.layers_per_stage),)
    whole = replace(layout, pp=1, vpp=1, layers_per_stage=layers, recompute="none")
    return micro_batch_s(replace(case, layout=whole), 0, tables, known)


def least_s(undivided: float, stages: int, chunks: int, micro_batches: int, schedule: str) -> float:
    """Seconds of a step at least, of which `undivided` are all stages' of a micro-batch.

    Of S seconds of all stages the slowest has S/p or more, and each of the others fills and drains the pipeline
    with its share of a micro-batch (`dslaunch.plan.time`): S/p (1 + (p-1)/(m v)), and S/p where the backward pass
    is split.

    Args:
        chunks: virtual stages of a rank.
    """
    filled = 1.0 if schedule in SPLIT else 1 + (stages - 1) / (micro_batches * chunks)
    return undivided * micro_batches / stages * filled
