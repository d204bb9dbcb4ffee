"""What Megatron finds where --load points."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.megatron_folder import STEP, TRACKER, MegatronCheckpoint
from dslaunch.files.position import START
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.run import Run, stock_runs, where_told
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_LOADING = "NVIDIA/Megatron-LM:megatron/training/checkpointing.py _load_base_checkpoint at core_v0.16.1"
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_RANDOM = "Megatron warns, and starts from random weights"


@rule("megatron.load", severity="wrong", raised_by="nobody", framework="megatron", evidence=_LOADING)
def load(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A --load that names no folder of checkpoints, or one that another number of ranks wrote."""
    runs = list(stock_runs(files, settings))
    for run in runs:
        yield from where_told(_of_step(run))
    for file in files.of("megatron_checkpoint"):
        found: MegatronCheckpoint = file.value
        yield from _of_folder(file, found)
        for run in runs if len(runs) == 1 else ():
            yield from where_told(_of_ranks(run, file, found))


def _of_step(run: Run) -> Iterator[Hit]:
    """The folder of one step, which has no tracker file."""
    folder = run.text("--load").rstrip("/").rpartition("/")[2]
    if STEP.fullmatch(folder) and not run.arguments.has("--ckpt-step"):
        number = re.sub(r"\D", "", folder).lstrip("0")
        step = f" with --ckpt-step {number}" if number else ""
        message = f"{folder} is one step, and {TRACKER} stands above it: {_RANDOM}."
        yield run.hit("--load", message, f"Name the folder above{step}.")


def _of_folder(file: File, found: MegatronCheckpoint) -> Iterator[Hit]:
    if not found.tracked:
        message = f"no {TRACKER} in this folder: {_RANDOM}."
        yield Hit(file.name, START, message, "Write the number of the step into it, such as 1000.")
    elif found.tracked not in found.steps:
        message = f"{TRACKER} names {found.tracked}, which isn't there: Megatron exits."
        yield Hit(file.name, START, message, "Copy that step, or name one that is there.", "error", "megatron")
    missing = found.tensor_parallel * found.pipeline_parallel - len(found.ranks)
    if missing > 0:
        grid = f"{found.tensor_parallel} x {found.pipeline_parallel}"
        message = f"{found.tracked}: {missing} of {grid} folders mp_rank_* missing, whose ranks exit."
        yield Hit(file.name, START, message, "Copy the rest.", "error", "megatron")


def _of_ranks(run: Run, file: File, found: MegatronCheckpoint) -> Iterator[Hit]:
    """The format `torch` is read by as many ranks as wrote it."""
    if not run.on("--load") or not found.ranks:
        return
    for flag, now, saved in ((_TP, run.tp, found.tensor_parallel), (_PP, run.pp, found.pipeline_parallel)):
        if now != saved:
            message = f"{flag} is {now}, and {file.name} was written with {saved} in a format that isn't cut anew."
            fix = "Convert it with tools/checkpoint/convert.py, or keep the size."
            yield Hit(run.file.name, run.at(flag, "--load"), message, fix, "error", "megatron")
