"""Batch arithmetic: train_batch_size = micro batch * accumulation steps * replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dslaunch.engines.deepspeed_keys import release
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.topology import replicas

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_EVIDENCE = "deepspeedai/DeepSpeed:deepspeed/runtime/config.py _set_batch_related_parameters 0.19.8, run"


@dataclass(frozen=True)
class _Batch:
    """The three keys of one file, each positive, or None where it isn't given."""

    train: float | None
    micro: float | None
    steps: float | None


@rule("batch.triangle", severity="error", raised_by="DeepSpeedConfig", evidence=_EVIDENCE + "; DeepSpeed#6914")
def triangle(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """All three batch keys are given, and they don't multiply."""
    for file, batch in _batches(files, settings):
        if batch.train is None or batch.micro is None or batch.steps is None:
            continue
        product = batch.micro * batch.steps
        ranks = replicas(plan, file, settings)
        if not ranks:
            if batch.train % product:
                message = f"{TRAIN} {batch.train:g} is no multiple of {batch.micro:g} * {batch.steps:g}"
                yield hit(file, (TRAIN,), f"{message}, so it fits no number of ranks. {_ASSERTION}", _DROP)
        elif all(batch.train != product * dp for dp in ranks):
            message = f"{TRAIN} {batch.train:g} != {batch.micro:g} * {batch.steps:g} * {ranks[0]} replicas"
            yield hit(file, (TRAIN,), f"{message} = {product * ranks[0]:g}. {_ASSERTION}", _DROP)


@rule("batch.divisible", severity="error", raised_by="DeepSpeedConfig", evidence=_EVIDENCE + "; OpenRLHF#346")
def divisible(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """train_batch_size isn't a multiple of what the other given keys and the ranks make."""
    for file, batch in _batches(files, settings):
        ranks = replicas(plan, file, settings)
        if batch.train is None or not ranks or (batch.micro is not None and batch.steps is not None):
            continue
        name = MICRO if batch.micro is not None else STEPS
        given = batch.micro or batch.steps or 1
        if all(batch.train % (given * dp) for dp in ranks):
            factors = f"{name} {given:g} * {ranks[0]}" if given != 1 else f"{ranks[0]}"
            message = f"{TRAIN} {batch.train:g} is no multiple of {factors} replicas = {given * ranks[0]:g}."
            effect = f"DeepSpeed rounds the third number down, and then: {_ASSERTION}"
            yield hit(file, (TRAIN,), f"{message} {effect}", f"Use a multiple of {given * ranks[0]:g}.")


@rule("batch.missing", severity="error", raised_by="DeepSpeedConfig", evidence=_EVIDENCE)
def missing(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Neither train_batch_size nor train_micro_batch_size_per_gpu is given."""
    for file in files.of("deepspeed_json"):
        if _is_elastic(file, settings) or "template" in file.name.rpartition("/")[2].lower():
            continue
        if isinstance(file.value, dict) and file.get(TRAIN) is None and file.get(MICRO) is None:
            path = (STEPS,) if STEPS in file.value else ()
            message = f"neither {TRAIN} nor {MICRO} is given; DeepSpeed asserts that one of them is."
            if any(_LIGHTNING in each.text for each in files.of("python")):
                message = f"neither {TRAIN} nor {MICRO} is given: Lightning's DeepSpeedStrategy fills {MICRO} in."
                yield hit(file, path, message, f"Give {MICRO} for any other program.", severity="info")
                continue
            yield hit(file, path, message, f"Give {MICRO}, and {STEPS} if it isn't 1.")


@rule("batch.derived", severity="info", raised_by="nobody", evidence=_EVIDENCE)
def derived(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """train_batch_size alone, which makes one pass of all the samples of a rank."""
    for file, batch in _batches(files, settings):
        ranks = replicas(plan, file, settings)
        if batch.train is None or batch.micro is not None or batch.steps is not None or len(ranks) != 1:
            continue
        samples = batch.train / ranks[0]
        if samples >= _MANY and samples.is_integer():
            message = f"{TRAIN} {batch.train:g} over {ranks[0]} replicas: one pass of {samples:g} samples on each."
            yield hit(file, (TRAIN,), message, f"Give {MICRO} too, if a pass is to hold fewer.")


_LIGHTNING = "DeepSpeedStrategy("
"""Lightning-AI/pytorch-lightning:src/lightning/pytorch/strategies/deepspeed.py 2.5."""
_MANY = 16
"""Samples in one pass that are rarely meant where nothing says so."""
_ASSERTION = "DeepSpeed asserts equality at start-up."
_DROP = f"Correct one of the three, or leave {TRAIN} out: DeepSpeed then computes it."


def _batches(files: FileSet, settings: Settings) -> Iterator[tuple[File, _Batch]]:
    """The files whose batch keys are numbers above 0; other values are for key.type, key.range, json.auto."""
    for file in files.of("deepspeed_json"):
        values = [file.get(name) for name in (TRAIN, MICRO, STEPS)]
        if not _is_elastic(file, settings) and all(value is None or _is_size(value) for value in values):
            yield file, _Batch(*values)


def _is_elastic(file: File, settings: Settings) -> bool:
    """Whether elastic training chooses the batch, as DeepSpeed did up to 0.19.7."""
    old = release(settings.deepspeed_version) <= release("0.19.7")
    return old and file.get("elasticity", "enabled") is True


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
