"""Megatron's arithmetic of pipelines: layers to stages, virtual stages, and micro-batches to run through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.rules.megatron.run import NotToldError, Run
from dslaunch.rules.megatron.sizes import Fault, sizes

_PP, _LAYERS = "--pipeline-model-parallel-size", "--num-layers"
_PER_STAGE, _STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
_LAYOUT = "--pipeline-model-parallel-layout"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
BUILT = "; it is found when the model is built"
_EQUAL = "Use a number of stages that divides the layers, or say how many the first and the last stage hold."


@dataclass(frozen=True)
class _Split:
    """How layers come to stages."""

    layers: int
    """Those that are shared out: the embedding and the loss may count as one each."""
    stages: int
    """Pipeline stages that share them."""
    virtual: int
    """Virtual stages per rank; 1: none."""


def virtual_stages(run: Run) -> int:
    """Virtual stages per rank; 1 where there are none, or where their number doesn't come out whole."""
    if run.on(_LAYOUT):
        raise NotToldError(_LAYOUT)
    if run.on(_STAGES):
        return max(1, run.size(_STAGES))
    if not run.on(_PER_STAGE):
        return 1
    size, layers = run.size(_PER_STAGE), _layers(run)
    if size < 1 or layers % run.pp or layers // run.pp % size:
        return 1
    return layers // run.pp // size


def _layers(run: Run) -> int:
    return run.size(_LAYERS) + sum(run.on(flag) for flag in _COUNTED)


def _one_way(run: Run) -> Iterator[Fault]:
    given = [flag for flag in (_PER_STAGE, _STAGES, _LAYOUT) if run.on(flag)]
    if len(given) > 1:
        yield tuple(given), f"{' and '.join(given)} both say how a rank's layers are cut.", "Keep one."
    uneven = [flag for flag in (_FIRST, _LAST) if run.on(flag)]
    if uneven and run.on(*_COUNTED):
        counted = next(flag for flag in _COUNTED if run.on(flag))
        yield uneven[0], f"{uneven[0]} and {counted} both say what the stages hold.", "Keep one."
    if uneven and run.on(_PER_STAGE) and not run.on(_STAGES):
        yield _PER_STAGE, f"{_PER_STAGE} with {uneven[0]}.", f"Use {_STAGES} with unequal stages."


def _equal(run: Run) -> Iterator[Fault]:
    if run.on(_FIRST, _LAST, _LAYOUT):
        return
    layers = _layers(run)
    built = BUILT if run.on(_STAGES) and not run.on(*_COUNTED) else ""
    if layers % run.pp:
        more = " (with the embedding or the loss)" if run.on(*_COUNTED) else ""
        message = f"{layers} layers{more} can't be cut into {_PP} {run.pp} equal stages"
        yield (_PP, _LAYERS), f"{message}{built}.", _EQUAL
        return
    held = layers // run.pp
    if run.on(_PER_STAGE) and run.size(_PER_STAGE) > 0 and held % run.size(_PER_STAGE):
        yield (
            _PER_STAGE, f"{held} layers of a stage are no multiple of {_PER_STAGE} {run.size(_PER_STAGE)}.",
            f"Use a number that divides {held}.",
        )  # fmt: skip
    elif run.on(_STAGES) and held % virtual_stages(run):
        yield (
            _STAGES,
            f"{held} layers of a stage can't be cut into {virtual_stages(run)}{built}.",
            f"Use a divisor of {held}.",
        )


def _unequal(run: Run) -> Iterator[Fault]:
    if not run.on(_FIRST, _LAST) or run.on(_LAYOUT, *_COUNTED):
        return
    ends = {flag: run.size(flag) for flag in (_FIRST, _LAST) if run.on(flag)}
    for flag, size in ends.items():
        if size < 1:
            yield flag, f"{flag} {size} is below 1.", "Use 1 or more."
        elif size % virtual_stages(run):
            yield (
                flag,
                f"{flag} {size} is no multiple of {virtual_stages(run)} virtual stages.",
                "Use a multiple.",
            )
    split = _Split(run.size(_LAYERS) - sum(ends.values()), run.pp - len(ends), virtual_stages(run))
    yield from _middle(run, next(iter(ends)), split)


def _middle(run: Run, flag: str, split: _Split) -> Iterator[Fault]:
    what = f"{split.layers} layers are left for {split.stages} stages in the middle"
    fix = "Choose numbers that leave the same number of layers for each stage in the middle."
    if split.stages <= 0:
        divides = run.between("", "0.13.0")
        if split.stages == 0 and (divides or (run.between("0.16.0", "") and split.layers)):
            yield flag, f"{what}.", fix
    elif split.layers % split.stages or (split.layers == 0 and run.between("0.16.0", "")):
        yield flag, f"{what}.", fix
    elif split.layers // split.stages % split.virtual:
        yield flag, f"{what}, no multiple of {split.virtual} virtual stages each.", fix


def _interleaved(run: Run) -> Iterator[Fault]:
    least = 3 if run.on("--no-overlap-p2p-communication") else 2
    asked = virtual_stages(run) > 1 or (run.between("", "0.14.0") and run.on(_PER_STAGE, _STAGES))
    if asked and run.pp < least:
        yield (
            (_PER_STAGE, _STAGES), f"virtual stages need {_PP} {least} or more, and it is {run.pp}.",
            f"Drop {_PER_STAGE} and {_STAGES}, or use more stages.",
        )  # fmt: skip


sizes(
    "megatron.layers", _one_way, _equal, _unequal, _interleaved,
    summary="Layers that can't be cut into the pipeline's stages and virtual stages.",
)  # fmt: skip


def _microbatches(run: Run) -> Iterator[Fault]:
    if virtual_stages(run) == 1 or run.on("--rampup-batch-size", "--step-batch-size-schedule"):
        return
    micro, ranks = run.size("--micro-batch-size"), run.tp * run.pp * run.cp
    if micro < 1 or run.world % ranks:
        return
    count, rest = divmod(run.size("--global-batch-size"), micro * (run.world // ranks))
    group = run.size(_GROUP, run.pp)
    if rest or group < 1:
        return
    left = count % group
    if group > count or group < run.pp or 0 < left < run.pp:
        yield (
            (_GROUP, "--global-batch-size"), f"{count} micro-batches go through {run.pp} stages in groups of "
            f"{group}: a group may hold {run.pp} to {count}, and the last one 0 or at least {run.pp}. Megatron "
            "stops at the first step.",
            f"Use a number of micro-batches that is a multiple of {run.pp}.",
        )  # fmt: skip


sizes(
    "megatron.microbatches", _microbatches,
    summary="Too few micro-batches for an interleaved schedule, or an uneven last group.",
    evidence="NVIDIA/Megatron-LM:megatron/core/pipeline_parallel/schedules.py "
    "forward_backward_pipelining_with_interleaving at core_v0.12.3 to core_v0.19.0",
)  # fmt: skip
