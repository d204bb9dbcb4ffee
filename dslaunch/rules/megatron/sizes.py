"""Megatron's arithmetic: heads, layers, experts, sequences and batches against the sizes of the grid."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.demands import ARGUMENTS, CONFIG, RUN
from dslaunch.rules.megatron.forks import of_fork
from dslaunch.rules.megatron.run import Run, of_versions, runs, stock_runs, where_told
from dslaunch.rules.registry import Check, Hit, RaisedBy, rule
from dslaunch.rules.settings import Settings

_TP, _CP = "--tensor-model-parallel-size", "--context-parallel-size"
_EP, _ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_HEADS, _HIDDEN, _GROUPS = "--num-attention-heads", "--hidden-size", "--num-query-groups"
_GLOBAL, _MICRO, _SEQ = "--global-batch-size", "--micro-batch-size", "--seq-length"
_EVIDENCE = f"{ARGUMENTS}, {CONFIG} at {RUN}"

Fault = tuple[str | tuple[str, ...], str, str]
"""At which flag, what was found, and the fix."""


def sizes(
    rule_id: str, *faults: Callable[[Run], Iterator[Fault]], summary: str, evidence: str = _EVIDENCE,
    raised_by: RaisedBy = "megatron", deepspeed: bool = False,
) -> Check:  # fmt: skip
    """Register one rule made of functions that yield faults; each stops where a size isn't told.

    Args:
        deepspeed: Megatron-DeepSpeed makes the same checks.
    """

    def find(run: Run) -> Iterator[Hit]:
        for found in faults:
            yield from (run.hit(*fault) for fault in where_told(found(run)))

    def check(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
        for run in runs(files, settings) if deepspeed else stock_runs(files, settings):
            yield from find(run) if run.is_deepspeed else of_fork(run, of_versions(run, find))

    check.__doc__ = summary
    return rule(
        rule_id, severity="error", raised_by=raised_by, evidence=evidence, framework="megatron"
    )(check)  # fmt: skip


def head_width(run: Run) -> Iterator[Fault]:
    """Heads that do not cut the hidden size evenly."""
    hidden, heads = run.size(_HIDDEN), run.size(_HEADS)
    if not run.on("--kv-channels") and heads > 0 and hidden % heads:
        yield (
            (_HEADS, _HIDDEN), f"{_HIDDEN} {hidden} is no multiple of {_HEADS} {heads}, without --kv-channels.",
            "Choose a number of heads that divides the hidden size, or give --kv-channels.",
        )  # fmt: skip


def _heads_over_ranks(run: Run) -> Iterator[Fault]:
    heads = run.size(_HEADS)
    if heads % run.tp:
        yield (
            _TP, f"{heads} attention heads can't be shared out over {_TP} {run.tp}.",
            f"Use a size that divides {heads}.",
        )  # fmt: skip


def _groups_over_ranks(run: Run) -> Iterator[Fault]:
    groups = run.size(_GROUPS, 1)
    if not run.on("--group-query-attention") or groups < 1 or groups % run.tp == 0:
        return
    if run.between("", "0.16.0"):
        yield (
            (_GROUPS, _TP), f"{groups} key/value groups are no multiple of {_TP} {run.tp} (before core 0.16.0).",
            f"Use a size that divides {groups}, or core 0.16.0, which can keep groups on several ranks.",
        )  # fmt: skip
    elif run.tp % groups:
        yield (
            (_GROUPS, _TP), f"{groups} key/value groups neither divide {_TP} {run.tp} nor are a multiple of it.",
            f"Use a size that divides {groups}, or that {groups} divides.",
        )  # fmt: skip


_COMM = "--cp-comm-type"


def _heads_over_context(run: Run) -> Iterator[Fault]:
    kinds = run.texts(_COMM)
    parts = run.texts("--hierarchical-context-parallel-sizes") if "a2a+p2p" in kinds else ()
    among = int(parts[0]) if parts and parts[0].isdecimal() else run.cp if "a2a" in kinds else 1
    if among < 2:
        return
    heads = run.size(_HEADS) // run.tp
    kept = run.on("--group-query-attention") and not run.on("--multi-latent-attention")
    groups = max(1, run.size(_GROUPS, 1) // run.tp) if kept else heads
    if heads % among or groups % among:
        yield (
            (_COMM, _CP), f"a2a shares out a rank's heads, and {heads} heads with {groups} key/value groups "
            f"aren't multiples of {among}, among which {_CP} shares them; the first step raises.",
            f"Use {_COMM} p2p, or smaller {_CP} or {_TP}.",
        )  # fmt: skip


sizes(
    "megatron.context-heads", _heads_over_context,
    summary="Attention heads that can't be shared out over the context-parallel ranks.",
    evidence="NVIDIA/TransformerEngine:transformer_engine/pytorch/attention/dot_product_attention/"
    "context_parallel.py AttnFuncWithCPAndQKVOA2A 2.20.0.dev0, read",
)  # fmt: skip


sizes(
    "megatron.heads", head_width, _heads_over_ranks, _groups_over_ranks,
    summary="Attention heads that can't be shared out over the tensor-parallel ranks.",
)  # fmt: skip


def _expert_grid(run: Run) -> Iterator[Fault]:
    if not run.on(_EP, _ETP, "--num-experts"):
        return
    ranks = run.expert_tp * run.ep * run.pp
    if ranks > 0 and run.world % ranks:
        grid = f"expert tp * ep * pp = {run.expert_tp} * {run.ep} * {run.pp} = {ranks}"
        yield (
            (_EP, _ETP),
            f"{grid} doesn't divide {run.world} ranks.",
            f"Choose sizes that divide {run.world}.",
        )


sizes(
    "megatron.expert-grid", _expert_grid,
    summary="The grid of the experts doesn't tile the ranks.",
    evidence="NVIDIA/Megatron-LM:megatron/core/parallel_state.py initialize_model_parallel 0.16.1, run",
)  # fmt: skip


def _sequence(run: Run) -> Iterator[Fault]:
    length = run.size(_SEQ)
    if run.cp > 1 and length % (2 * run.cp):
        yield (
            (_SEQ, _CP), f"{_SEQ} {length} is no multiple of 2 * {_CP} {run.cp} = {2 * run.cp}.",
            f"Use a multiple of {2 * run.cp}.",
        )  # fmt: skip


def _positions(run: Run) -> Iterator[Fault]:
    length, positions = run.size(_SEQ), run.size("--max-position-embeddings")
    if positions < length:
        yield (
            "--max-position-embeddings", f"--max-position-embeddings {positions} is below {_SEQ} {length}.",
            f"Raise it to {length}, or shorten the sequences.",
        )  # fmt: skip


def _sequence_over_ranks(run: Run) -> Iterator[Fault]:
    length = run.size(_SEQ)
    if (
        run.on("--sequence-parallel")
        and length % (2 * run.cp if run.cp > 1 else 1) == 0
        and length // run.cp % run.tp
    ):
        yield (
            (_SEQ, _TP), f"--sequence-parallel cuts {length // run.cp} tokens over {_TP} {run.tp}, which doesn't "
            "divide them; the first forward pass fails.",
            f"Use sequences of a multiple of {run.cp * run.tp} tokens.",
        )  # fmt: skip


def _hierarchy(run: Run) -> Iterator[Fault]:
    parts = [int(part) for part in run.texts("--hierarchical-context-parallel-sizes") if part.isdecimal()]
    if parts and prod(parts) != run.cp:
        yield (
            "--hierarchical-context-parallel-sizes", f"their product {prod(parts)} isn't {_CP} {run.cp}.",
            "Choose sizes whose product is the context-parallel size.",
        )  # fmt: skip


sizes(
    "megatron.sequence", _sequence, _positions, _sequence_over_ranks, _hierarchy,
    summary="A sequence length that the grid or the position embeddings don't take.",
)  # fmt: skip


def _batch(run: Run) -> Iterator[Fault]:
    micro, whole = run.size(_MICRO), run.size(_GLOBAL)
    if run.on("--decrease-batch-size-if-needed", "--rampup-batch-size", "--step-batch-size-schedule"):
        # Since core 0.18 the batch of the evaluation, the same unless given, has to come out whole nevertheless.
        own = run.on("--eval-global-batch-size", "--eval-micro-batch-size", "--step-batch-size-schedule")
        if own or not run.between("0.18.0", ""):
            return
    ranks = run.tp * run.pp * run.cp * run.ulysses
    if micro < 1 or whole < 1 or run.world % ranks:
        return
    replicas = run.world // ranks
    if whole % (micro * replicas):
        yield (
            _GLOBAL, f"{_GLOBAL} {whole} is no multiple of {_MICRO} {micro} * {replicas} replicas = "
            f"{micro * replicas}.", f"Use a multiple of {micro * replicas}.",
        )  # fmt: skip


def _rampup(run: Run) -> Iterator[Fault]:
    flag, steps = "--rampup-batch-size", run.texts("--rampup-batch-size")
    if len(steps) != 3 or not all(re.fullmatch(r"-?\d+", step) for step in steps):
        return
    start, increment, samples, whole = (*map(int, steps), run.size(_GLOBAL))
    if increment < 1 or start < 1 or start > whole or (whole - start) % increment:
        fix = f"Use steps that divide {whole} - {start}."
        yield flag, f"from {start} in steps of {increment} it doesn't reach {_GLOBAL} {whole}.", fix
    elif start == whole or samples < 1:
        what = "begins with the whole batch" if start == whole else f"takes {samples} samples"
        yield flag, f"{flag} {what}: ZeroDivisionError, or an assertion.", f"Leave {flag} out."
    else:
        yield from _each_batch(run, start, increment)


def _each_batch(run: Run, start: int, increment: int) -> Iterator[Fault]:
    """Every batch of the ramp-up is made of whole micro batches, the first and each increment."""
    ranks = run.tp * run.pp * run.cp * run.ulysses
    if run.on("--decrease-batch-size-if-needed") or run.world % ranks or run.size(_MICRO) < 1:
        return
    each = run.size(_MICRO) * (run.world // ranks)
    for what, size in (("first batch", start), ("increment", increment)):
        if size % each:
            message = f"the {what} of the ramp-up, {size}, is no multiple of {_MICRO} times replicas = {each}"
            message += "; Megatron stops at the step that begins with it."
            yield "--rampup-batch-size", message, f"Use multiples of {each}."
            return


def _positive(run: Run) -> Iterator[Fault]:
    for flag in (_MICRO, _GLOBAL):
        if run.on(flag) and run.size(flag) < 1:
            yield flag, f"{flag} {run.size(flag)} is below 1.", "Use 1 or more."


sizes(
    "megatron.batch", _batch, _rampup, _positive,
    summary="The global batch isn't a multiple of micro batch and replicas.", deepspeed=True,
    evidence=f"{ARGUMENTS}, megatron/core/num_microbatches_calculator.py at {RUN}",
)  # fmt: skip


def _degrees(run: Run) -> Iterator[Fault]:
    for flag in (_TP, "--pipeline-model-parallel-size", _CP, _EP):
        if run.arguments.has(flag) and run.size(flag) < 1:
            yield flag, f"{flag} {run.size(flag)} is below 1; Megatron stops at start-up.", "Use 1 or more."


sizes(
    "megatron.degree", _degrees, summary="A degree of parallelism below 1.",
    evidence=f"{ARGUMENTS} at core_v0.16.1, run",
)  # fmt: skip
