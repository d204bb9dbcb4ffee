"""What Megatron-DeepSpeed's own validation of its arguments refuses, behind its parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.run import Run, deepspeed_runs, where_told
from dslaunch.rules.megatron.sizes import Fault, head_width
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_HEADS, _GROUPS = "--num-attention-heads", "--num-key-value-heads"
_SEQ, _POSITIONS, _LAYERS = "--seq-length", "--max-position-embeddings", "--num-layers"
_PP, _VIRTUAL = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
_ULYSSES, _DDP, _SCATTERED = "--ds-sequence-parallel-size", "--DDP-impl", "--no-contiguous-buffers-in-local-ddp"
_SPLIT = "--pipeline-model-parallel-split-rank"
_ITERS, _SAMPLES, _FRACTION = "--train-iters", "--train-samples", "--lr-warmup-fraction"
_GRANULARITY, _METHOD = "--recompute-granularity", "--recompute-method"
_GONE = {
    "--batch-size": "--micro-batch-size",
    "--warmup": _FRACTION,
    "--model-parallel-size": "--tensor-model-parallel-size",
}
_ENCODERS = {_LAYERS: "--encoder-num-layers", _SEQ: "--encoder-seq-length"}
_NOT_BY_ITERATIONS = (_SAMPLES, "--lr-decay-samples", "--lr-warmup-samples", "--rampup-batch-size")
_NOT_BY_SAMPLES = ("--lr-decay-iters", "--lr-warmup-iters")


@rule(
    "megatron-deepspeed.arguments", severity="error", raised_by="megatron",
    evidence="deepspeedai/Megatron-DeepSpeed:megatron/arguments.py validate_args, 4efb479, DeepSpeed 0.19",
)  # fmt: skip
def arguments(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Arguments of Megatron-DeepSpeed that its own validation stops at: sizes, types, course, recompute."""
    for run in deepspeed_runs(files, settings):
        for faults in _FAULTS:
            yield from (run.hit(*fault) for fault in where_told(faults(run)))


def _gone(run: Run) -> Iterator[Fault]:
    for flag, instead in _GONE.items():
        if run.arguments.has(flag):
            yield flag, f"{flag} is no longer valid: AssertionError.", f"Write {instead}."


def _given_twice(run: Run) -> Iterator[Fault]:
    for flag, other in _ENCODERS.items():
        if run.arguments.has(flag) and run.arguments.has(other):
            yield other, f"{flag} and {other} are both given: AssertionError.", f"Leave out {other}."


def _groups(run: Run) -> Iterator[Fault]:
    heads = run.size(_HEADS)
    groups = run.size(_GROUPS, heads)
    if groups > 0 and heads % groups:
        yield _GROUPS, f"{_HEADS} {heads} is no multiple of {_GROUPS} {groups}.", f"Use a divisor of {heads}."
    for flag in ("--mos", "--kd"):
        if run.arguments.has(flag) and groups != heads:
            yield flag, f"{flag} beside grouped queries: AssertionError.", f"Leave out {flag}, or {_GROUPS}."


def _positions(run: Run) -> Iterator[Fault]:
    length, most = run.size(_SEQ), run.size(_POSITIONS)
    if length > most:
        yield (
            (_POSITIONS, _SEQ), f"{_SEQ} {length} is more than {_POSITIONS} {most}: AssertionError.",
            f"Write {_POSITIONS} {length} or more.",
        )  # fmt: skip


def _types(run: Run) -> Iterator[Fault]:
    if run.arguments.has("--fp16") and run.arguments.has("--bf16"):
        yield ("--fp16", "--bf16"), "--fp16 and --bf16 are both given: AssertionError.", "Leave one of them out."
    if run.arguments.has("--fp16-lm-cross-entropy") and not run.on("--fp16"):
        yield "--fp16-lm-cross-entropy", "The loss in fp16 needs --fp16.", "Add --fp16, or leave it out."
    if run.arguments.has("--fp32-residual-connection") and not run.on("--fp16", "--bf16"):
        yield "--fp32-residual-connection", "It needs --fp16 or --bf16.", "Leave it out: all is in fp32."


def _gradients(run: Run) -> Iterator[Fault]:
    if run.on("--bf16", "--accumulate-allreduce-grads-in-fp32", "--use-distributed-optimizer"):
        why = "bf16, gradients in fp32 and the distributed optimizer need Megatron's own DDP with its buffers"
        if (kind := run.text(_DDP, "local")) != "local":
            yield _DDP, f"{_DDP} is {kind}; {why}: AssertionError.", f"Leave out {_DDP}."
        if run.arguments.has(_SCATTERED):
            yield _SCATTERED, f"{why}: AssertionError.", f"Leave out {_SCATTERED}."


def _course(run: Run) -> Iterator[Fault]:
    for by, others in ((_ITERS, _NOT_BY_ITERATIONS), (_SAMPLES, _NOT_BY_SAMPLES)):
        if not run.arguments.has(by):
            continue
        for other in others:
            if run.arguments.has(other) and not _is_none(run, other):
                yield other, f"{other} beside {by}: AssertionError.", f"Count everything as {by} does."
        warmup = "--lr-warmup-iters" if by == _ITERS else "--lr-warmup-samples"
        if run.arguments.has(_FRACTION) and run.arguments.has(warmup) and not _is_none(run, warmup):
            yield _FRACTION, f"{_FRACTION} beside {warmup}: AssertionError.", "Leave one of them out."


def _is_none(run: Run, flag: str) -> bool:
    """Whether a warm-up is that of the parser's default."""
    return "warmup" in flag and run.size(flag) == 0


def _rates(run: Run) -> Iterator[Fault]:
    least, rate = run.number("--min-lr", 0.0), run.number("--lr")
    if least > rate:
        yield ("--min-lr", "--lr"), f"--min-lr {least:g} is above --lr {rate:g}: AssertionError.", "Lower it."


def _decay(run: Run) -> Iterator[Fault]:
    flags = ("--start-weight-decay", "--end-weight-decay")
    style = run.text("--weight-decay-incr-style", "constant")
    for flag in flags:
        if style == "constant" and run.arguments.has(flag):
            yield flag, f"{flag} without --weight-decay-incr-style: AssertionError.", "Say linear or cosine."
        if style != "constant" and not run.on(flag):
            yield "--weight-decay-incr-style", f"{style} without {flag}: AssertionError.", f"Add {flag}."


def _saving(run: Run) -> Iterator[Fault]:
    if run.arguments.has("--save") and not run.on("--save-interval"):
        yield "--save", "--save without --save-interval: AssertionError.", "Add --save-interval."


def _stages(run: Run) -> Iterator[Fault]:
    if run.arguments.has("--no-pipeline-parallel") and run.pp > 1:
        yield (
            "--no-pipeline-parallel", f"--no-pipeline-parallel beside {_PP} {run.pp}: AssertionError.",
            f"Leave out {_PP}, or --no-pipeline-parallel.",
        )  # fmt: skip
    if run.arguments.has(_SPLIT) and run.pp > 1 and run.size(_SPLIT) >= run.pp:
        message = f"{_SPLIT} {run.size(_SPLIT)} is no stage of {run.pp}: AssertionError."
        yield _SPLIT, message, "Name an earlier one."
    if run.arguments.has(_VIRTUAL):
        layers, each = run.size(_LAYERS), run.size(_VIRTUAL)
        if run.pp <= 2:
            yield _VIRTUAL, f"{_VIRTUAL} takes three stages or more, not {run.pp}.", f"Leave out {_VIRTUAL}."
        if each > 0 and layers % each:
            yield _VIRTUAL, f"{layers} layers are no multiple of {_VIRTUAL} {each}.", f"Use a divisor of {layers}."


def _sequence(run: Run) -> Iterator[Fault]:
    shards = run.size(_ULYSSES, 1)
    ranks = run.tp * run.pp * shards
    if shards > 1 and run.world % ranks:
        yield (
            _ULYSSES, f"tp {run.tp} x pp {run.pp} x {shards} = {ranks} does not divide {run.world} ranks.",
            "Choose sizes whose product divides the number of ranks.",
        )  # fmt: skip


def _recompute(run: Run) -> Iterator[Fault]:
    if run.arguments.has("--distribute-checkpointed-activations") and not run.on("--checkpoint-activations"):
        yield (
            "--distribute-checkpointed-activations", "It needs --checkpoint-activations: AssertionError.",
            "Add --checkpoint-activations.",
        )  # fmt: skip
    kept = run.text(_GRANULARITY, "")
    selective = run.arguments.has("--recompute-activations") or kept == "selective"
    if selective and run.arguments.has(_METHOD):
        yield _METHOD, f"{_METHOD} beside selective recompute: AssertionError.", f"Leave out {_METHOD}."
    spread = "--distribute-saved-activations"
    if run.arguments.has(spread) and (run.tp == 1 or selective or kept != "full" or not run.on(_METHOD)):
        yield (
            spread, f"It needs tp of 2 or more, {_GRANULARITY} full and {_METHOD}: AssertionError.",
            f"Give all three, or leave out {spread}.",
        )  # fmt: skip


def _fp8(run: Run) -> Iterator[Fault]:
    for flag in ("--fp8-e4m3", "--fp8-hybrid"):
        if run.arguments.has(flag) and run.text("--transformer-impl", "local") != "transformer_engine":
            yield flag, f"{flag} needs --transformer-impl transformer_engine: AssertionError.", "Add it."
    if run.arguments.has("--fp8-e4m3") and run.arguments.has("--fp8-hybrid"):
        yield "--fp8-hybrid", "--fp8-e4m3 and --fp8-hybrid are both given: AssertionError.", "Leave one out."


_FAULTS: tuple[Callable[[Run], Iterator[Fault]], ...] = (
    _gone, _given_twice, head_width, _groups, _positions, _types, _gradients, _course, _rates, _decay, _saving,
    _stages, _sequence, _recompute, _fp8,
)  # fmt: skip
