"""`python -m benchmarks.predict FILE`: a JSON line for each record of the file, on standard output.

The shipped tables are used as they are; `python -m benchmarks.accuracy` is the one that holds sources out. Records
whose id stands in data/mends.yaml are mended first.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from benchmarks import torch_family
from benchmarks.flops_kinds import step_flops
from benchmarks.records import MENDS, Record, read, world_size
from benchmarks.settings import Missing, Setting, setting
from dslaunch.hardware.efficiency import SHIPPED, Tables
from dslaunch.plan.case import Case
from dslaunch.plan.memory import overhead_gib, reserved_gib, stage_memory
from dslaunch.plan.time import step_time

_STAGE = re.compile(r"\bpp_rank=(\d+)")
"""The pipeline stage that was measured, in a record's words."""


@dataclass(frozen=True)
class Predicted:
    """What is printed for one record. None: not predicted."""

    id: str
    peak_memory_gib: float | None = None
    memory_kind: str | None = None
    """allocated, reserved or nvidia_smi: which figure peak_memory_gib is."""
    step_time_s: float | None = None
    tflops_per_gpu: float | None = None
    """FLOPs as the record's source counts them."""
    tokens_per_s_per_gpu: float | None = None
    fits: bool | None = None
    refused: str | None = None


def predict(record: Record, tables: Tables = SHIPPED) -> Predicted:
    """The prediction for one record; refused if it lacks what nobody could guess or contradicts itself."""
    try:
        found = setting(record)
    except Missing as fact:
        return Predicted(record.id, refused=f"{fact} is not given")
    except ValidationError as error:
        return Predicted(record.id, refused=f"no run can be so: {error.errors()[0]['msg']}")
    kind = memory_kind(record)
    peak = peak_gib(found, kind)
    time = step_time(found.cases, tables)
    gpus, training = world_size(record), found.config.training
    flops = step_flops(record, next(iter(found.cases.values())))
    return Predicted(
        record.id,
        peak_memory_gib=peak,
        memory_kind=kind,
        step_time_s=time.step_s,
        tflops_per_gpu=flops / time.step_s / gpus / 1e12,
        tokens_per_s_per_gpu=training.global_batch * training.seq_len / time.step_s / gpus,
        fits=fits(found),
    )


def fits(found: Setting) -> bool:
    """Whether what is allocated fits beside the device's context: the allocator gives freed blocks back first."""
    first = next(iter(found.cases.values()))
    overhead = overhead_gib(first, found.config.cluster.world_size)
    return peak_gib(found, "allocated") + overhead < found.config.cluster.gpu.memory_gib


def memory_kind(record: Record) -> str:
    """The figure that the record's memory is; `allocated` where it prints none."""
    kind = torch_family.memory_kind(record) or record.measured.memory_class or "allocated"
    return "reserved" if kind == "as_printed" else kind


def peak_gib(found: Setting, kind: str) -> float:
    """Memory of the rank that was measured, else of the fullest: allocated, reserved, or what nvidia-smi shows."""
    of = stage_gib if kind == "allocated" else reserved_gib
    stages = [
        sum(of(case, min(stage, case.layout.pp - 1)) for case in found.cases.values())
        for stage in range(max(case.layout.pp for case in found.cases.values()))
    ]
    words = found.record.measured.peak_memory_kind or ""
    named = _STAGE.search(words)
    peak = stages[-1] if "LAST global rank" in words else max(stages)
    peak = stages[min(int(named[1]), len(stages) - 1)] if named else peak
    if kind != "nvidia_smi":
        return peak
    first = next(iter(found.cases.values()))
    return peak + overhead_gib(first, found.config.cluster.world_size)


def stage_gib(case: Case, stage: int) -> float:
    """Allocated on a rank of the stage at the fullest moment."""
    return stage_memory(case, stage).total


def ledger(record: Record, kind: str, tables: Tables = SHIPPED) -> str:
    """The terms of a prediction in words, the largest first: of the fullest stage, or of the slowest."""
    run = setting(record)
    if kind == "memory":
        stages = [
            vars(stage_memory(case, stage)) for case in run.cases.values() for stage in range(case.layout.pp)
        ]
        terms = max(stages, key=lambda stage: stage["total"])
    else:
        found = [stage for stages in step_time(run.cases, tables).stages.values() for stage in stages]
        terms = max(found, key=lambda stage: sum(stage.values()))
    rows = sorted(
        ((value, name) for name, value in terms.items() if name != "total" and value > 0), reverse=True
    )
    return ", ".join(f"{name} {value:.4g}" for value, name in rows)


def main(arguments: list[str]) -> int:
    """Print a line for each record; exit status 2 where the file can't be read."""
    if len(arguments) != 1:
        print("usage: python -m benchmarks.predict FILE", file=sys.stderr)
        return 2
    try:
        records = read(Path(arguments[0]), MENDS)
    except (OSError, ValueError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    for record in records:
        print(json.dumps(asdict(predict(record))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
