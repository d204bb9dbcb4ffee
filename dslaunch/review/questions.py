"""What a reviewer should ask about a change: asked where the keys that changed make it a question."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dslaunch.planfile import Plan
from dslaunch.review.changes import FileChange, KeyChange
from dslaunch.review.figures_text import sentence
from dslaunch.review.side import Side

_SHARDING = ("tp", "pp", "vpp", "ep", "etp", "dp", "zero", "layers_per_stage")
_ASKED = ("training.global_batch", "training.steps", "training.precision", "training.grad_accum_dtype",
          "training.seed", "files.data_path")  # fmt: skip
"""Keys of convergence that a question of their own is about; model.* and engine.extra are others."""
_TIGHT = 0.05
"""Share of a GPU's limit below which room is worth a question."""


def questions(
    before: Side, after: Side, keys: Sequence[KeyChange], files: Sequence[FileChange]
) -> tuple[str, ...]:
    """Whole sentences, those about the result first."""
    changed = {change.key for change in keys}
    return (
        *_batch(before.plan, after.plan, changed),
        *_result(before.plan, after.plan, changed),
        *_learning(keys),
        *_resuming(changed),
        *_memory(before, after),
        *_bill(before, after),
        *_safety(before.plan, after.plan, keys),
        *_unplanned(keys, files),
    )


def _batch(old: Plan, new: Plan, changed: set[str]) -> Iterator[str]:
    a, b = old.training, new.training
    ratio = b.global_batch / a.global_batch
    if ratio != 1 and a.lr == b.lr:
        yield (
            f"The global batch goes from {a.global_batch} to {b.global_batch} and the learning rate stays "
            f"{b.lr:g}: is that meant? In proportion it would be {b.lr * ratio:.3g}, by the square root "
            f"{b.lr * math.sqrt(ratio):.3g}."
        )
    seen = a.global_batch * a.steps, b.global_batch * b.steps
    if seen[0] != seen[1]:
        yield f"The run sees {seen[1]:,} samples, before {seen[0]:,}: do warm-up and decay still fit?"
    if ratio == 1 and any(key.endswith((".micro_batch", ".num_microbatches", ".dp")) for key in changed):
        yield (
            "The batch is the same but is added up in another order: is a run compared bit by bit with an "
            "earlier one?"
        )


def _result(old: Plan, new: Plan, changed: set[str]) -> Iterator[str]:
    a, b = old.training, new.training
    if a.precision != b.precision:
        extra = " fp16 needs loss scaling: is overflow watched?" if b.precision == "fp16" else ""
        yield f"Precision goes from {a.precision} to {b.precision}: which run shows that the loss follows?{extra}"
    if a.grad_accum_dtype != b.grad_accum_dtype:
        yield (
            f"Gradients are accumulated in {b.grad_accum_dtype}, before in {a.grad_accum_dtype}: over how many "
            "micro-batches, and was the loss compared?"
        )
    if a.seed != b.seed or old.files.data_path != new.files.data_path:
        yield "Seed or data differ, and so do the samples and their order: what is this run compared with?"
    if any(key.startswith("model.") for key in changed):
        yield "The model itself differs: do weights and checkpoints still load, and is the baseline still one?"


def _learning(keys: Sequence[KeyChange]) -> Iterator[str]:
    """About what else changes the result: learning rates, the optimizer, its schedule, clipping, weights."""
    changed = {change.key for change in keys}
    found = [
        sentence(change)
        for change in keys
        if change.kind == "convergence"
        and change.key not in _ASKED
        and not change.key.startswith(("model.", "engine.extra"))
        and not _follows(change.key, changed)
    ]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        yield f"The result changes with {'; '.join(found[:3])}{more}: which earlier run is it compared with?"


def _follows(key: str, changed: set[str]) -> bool:
    """Whether a component's setting is the whole training's, or its size the model's, which changed too."""
    part = key.rpartition(".")[2]
    whole = f"training.{part}" in changed or (part == "params" and any(k.startswith("model.") for k in changed))
    return key.startswith("components.") and whole


def _resuming(changed: set[str]) -> Iterator[str]:
    sharded = sorted({key for key in changed if key.rpartition(".")[2] in _SHARDING or key == "engine.name"})
    if sharded:
        more = f" and {len(sharded) - 3} more" if len(sharded) > 3 else ""
        yield (
            f"Checkpoints are cut differently ({', '.join(sharded[:3])}{more}): does a run that is under way have "
            "to load them?"
        )


def _memory(before: Side, after: Side) -> Iterator[str]:
    old, new = before.prediction, after.prediction
    if new is None or (old is not None and old.peak_memory_gib >= new.peak_memory_gib):
        return
    room = new.memory_limit_gib - new.peak_memory_gib
    if 0 <= room < _TIGHT * new.memory_limit_gib:
        yield (
            f"{room:.1f} GiB of {new.memory_limit_gib:.1f} are left on the fullest GPU ({new.band}): was a "
            "step of it measured?"
        )


def _bill(before: Side, after: Side) -> Iterator[str]:
    old, new = before.prediction, after.prediction
    if old is None or new is None or not old.tokens_per_s or not new.tokens_per_s:
        return
    spent = [
        side.plan.world_size * 1e9 / found.tokens_per_s / 3600
        for side, found in ((before, old), (after, new))
    ]
    if spent[1] > 1.02 * spent[0]:
        yield (
            f"A billion tokens take {spent[1]:,.1f} GPU hours, before {spent[0]:,.1f}: what is gained for the "
            f"{spent[1] / spent[0] - 1:.0%} more?"
        )


def _safety(old: Plan, new: Plan, keys: Sequence[KeyChange]) -> Iterator[str]:
    waived = sorted(set(new.accepted) - set(old.accepted))
    if waived:
        yield f"{', '.join(waived)} is waived now: who answers for it, and until when?"
    every = new.files.checkpoint_every
    if every != old.files.checkpoint_every:
        yield (
            f"A failure now loses up to {every} steps: is that acceptable on {new.cluster.nodes} nodes?"
            if every
            else "Nothing is saved before the end any more: what happens when a node fails?"
        )
    if any(change.key == "engine.version" for change in keys):
        yield f"The files are for {new.engine.name} {new.engine.version}: is that what the nodes have installed?"


def _unplanned(keys: Sequence[KeyChange], files: Sequence[FileChange]) -> Iterator[str]:
    extra = [change.key for change in keys if change.key.startswith("engine.extra")]
    if extra:
        yield f"{', '.join(extra)} goes to the framework as it stands, and no figure here counts it: who tried it?"
    if keys or not files:
        return
    names = [change.name for change in files if change.kind != "cosmetic"]
    if names:
        yield f"The plan is the same, but {', '.join(names)} is not: which setting or template does that?"
