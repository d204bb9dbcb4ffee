"""`python -m benchmarks.predict FILE`: a JSON line for each record of the file, on standard output.

The shipped tables are used as they are; `python -m benchmarks.accuracy` is the one that holds sources out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.records import Record, read
from benchmarks.settings import Missing, Setting, setting, world_size
from dslaunch.hardware.efficiency import UNCALIBRATED, Efficiency
from dslaunch.plan.memory import overhead_gib, stage_memory
from dslaunch.plan.time import step_time


@dataclass(frozen=True)
class Predicted:
    """What is printed for one record. None: not predicted."""

    id: str
    peak_memory_gib: float | None = None
    memory_kind: str | None = None
    """allocated, reserved or nvidia_smi: which figure peak_memory_gib is."""
    step_time_s: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOPs, or hardware FLOPs where the record counts those."""
    tokens_per_s_per_gpu: float | None = None
    fits: bool | None = None
    refused: str | None = None


def predict(record: Record, tables: Efficiency = UNCALIBRATED) -> Predicted:
    """The prediction for one record; refused where it lacks a fact that nobody could guess."""
    try:
        found = setting(record)
    except Missing as fact:
        return Predicted(record.id, refused=f"{fact} is not given")
    kind = memory_kind(record)
    peak = peak_gib(found, kind)
    time = step_time(found.cases, tables)
    gpus, training = world_size(record), found.config.training
    flops = time.hardware_flops if "hardware" in (record.measured.tflops_kind or "") else time.model_flops
    return Predicted(
        record.id,
        peak_memory_gib=peak,
        memory_kind=kind,
        step_time_s=time.step_s,
        tflops_per_gpu=flops / time.step_s / gpus / 1e12,
        tokens_per_s_per_gpu=training.global_batch * training.seq_len / time.step_s / gpus,
        fits=peak_gib(found, "nvidia_smi") < found.config.cluster.gpu.memory_gib,
    )


def memory_kind(record: Record) -> str:
    """The figure that the record's memory is; `allocated` where it prints none."""
    kind = record.measured.memory_class or "allocated"
    return "reserved" if kind == "as_printed" else kind


def peak_gib(found: Setting, kind: str) -> float:
    """The fullest rank's memory in GiB: allocated, reserved, or what nvidia-smi shows."""
    stages = [
        sum(stage_memory(case, min(stage, case.layout.pp - 1)).total for case in found.cases.values())
        for stage in range(max(case.layout.pp for case in found.cases.values()))
    ]
    allocated = max(stages)
    if kind == "allocated":
        return allocated
    first = next(iter(found.cases.values()))
    return allocated / 0.94 + (overhead_gib(first, found.config.cluster.world_size) if kind == "nvidia_smi" else 0)


def main(arguments: list[str]) -> int:
    """Print a line for each record; exit status 2 where the file can't be read."""
    if len(arguments) != 1:
        print("usage: python -m benchmarks.predict FILE", file=sys.stderr)
        return 2
    try:
        records = read(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    for record in records:
        print(json.dumps(asdict(predict(record))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
