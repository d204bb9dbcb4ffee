"""The order of work in a pipeline over one step, drawn to scale from the time ledger.

1F1B and GPipe as in arXiv:2104.04473, section 2.2, interleaving as in its section 2.2.2: stage s of p runs
2 * (p - s - 1) + (v - 1) * p forwards first, in groups of p micro-batches by model chunk. zb-h1 as
megatron/core/pipeline_parallel/deepspeed_zbh1_schedule.py of Megatron-DeepSpeed has it: stage s puts off the
weights' gradients of s micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dslaunch.planfile import ComponentPlan

ONCE = ("dp", "optimizer", "offload")
"""Terms of the time ledger that come once, after the micro-batches; the others are spread over these."""


_SPLIT = "zb-h1"
"""The schedule of an engine's that splits the backward pass."""


@dataclass(frozen=True)
class Span:
    """Something that one stage does from `start` to `end`, in seconds of the step."""

    stage: int
    what: str
    """forward | backward | weights | dp | optimizer | offload"""
    start: float
    end: float
    micro_batch: int = -1
    chunk: int = 0

    def moved(self, seconds: float) -> Span:
        return Span(
            self.stage, self.what, self.start + seconds, self.end + seconds, self.micro_batch, self.chunk
        )


@dataclass(frozen=True)
class _Op:
    forward: bool
    micro_batch: int
    chunk: int
    weights: bool = False
    """Their gradients alone, which a backward pass has left out."""

    @property
    def what(self) -> str:
        return "forward" if self.forward else "weights" if self.weights else "backward"


def spans(plan: ComponentPlan, times: Sequence[Mapping[str, float]], schedule: str) -> list[Span]:
    """All that the stages of a component do in one step, each stage's in its order.

    Args:
        times: the time ledger of each stage: term -> seconds a step.
    """
    orders = [_order(plan, stage, schedule) for stage in range(plan.pp)]
    costs = [_seconds(plan, terms, schedule == _SPLIT) for terms in times]
    done: dict[tuple[int, _Op], float] = {}
    found: list[list[Span]] = [[] for _ in orders]
    waiting = True
    while waiting:
        waiting = False
        for stage, order in enumerate(orders):
            while len(found[stage]) < len(order):
                op = order[len(found[stage])]
                ready = _ready(plan, stage, op, done)
                if ready is None:
                    break
                start = max(ready, found[stage][-1].end if found[stage] else 0.0)
                end = start + costs[stage][op.what]
                done[stage, op] = end
                found[stage].append(Span(stage, op.what, start, end, op.micro_batch, op.chunk))
                waiting = True
    assert all(len(ran) == len(order) for ran, order in zip(found, orders, strict=True)), (
        "a stage waits for ever"
    )
    ended = max(ran[-1].end for ran in found)
    return [span for ran in found for span in ran] + list(_once(times, ended))


def merged(found: Sequence[Span], shortest: float) -> list[Span]:
    """The same with micro-batches side by side as one span of work; gaps below `shortest` seconds are not seen."""
    rows: list[Span] = []
    for span in found:
        last = rows[-1] if rows else None
        if span.what in ONCE:
            rows.append(span)
        elif last and last.stage == span.stage and last.what == "work" and span.start - last.end < shortest:
            rows[-1] = Span(span.stage, "work", last.start, span.end)
        else:
            rows.append(Span(span.stage, "work", span.start, span.end))
    return rows


def _order(plan: ComponentPlan, stage: int, schedule: str) -> list[_Op]:
    p, m, v = plan.pp, plan.num_microbatches, plan.vpp
    if schedule == _SPLIT:
        return _split_order(p, m, stage)
    total = m * v
    forwards = [_Op(True, *_virtual(k, p, v, m)) for k in range(total)]
    backwards = [_Op(False, b, v - 1 - c) for b, c in (_virtual(k, p, v, m) for k in range(total))]
    first = total if schedule == "gpipe" else p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
    first = min(first, total)
    order = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[total - first :]


def _split_order(p: int, m: int, stage: int) -> list[_Op]:
    """Forwards until the first gradient can come back, then by turns; weights `stage` micro-batches later."""
    ahead, order = min(m, p - stage - 1), list[_Op]()
    for done in range(m + ahead):
        order += [_Op(True, done, 0)] if done < m else []
        order += [_Op(False, done - ahead, 0)] if done >= ahead else []
        order += [_Op(False, done - ahead - stage, 0, weights=True)] if done >= ahead + stage else []
    put_off = range(max(0, m - stage), m)
    return order + [_Op(False, micro_batch, 0, weights=True) for micro_batch in put_off]


def _virtual(k: int, p: int, v: int, m: int) -> tuple[int, int]:
    """(micro-batch, chunk) of the k-th forward: p micro-batches through each chunk in turn."""
    if v == 1:
        return k, 0
    group, within = divmod(k, p * v)
    size = min(p, m - group * p)
    return group * p + within % size, within // size


def _seconds(plan: ComponentPlan, terms: Mapping[str, float], split: bool) -> dict[str, float]:
    """Of one micro-batch through one chunk, by what is done. The ledger has their sum: what computes and sends is
    cut 1 to 2, or 1 to 1 where weights get no gradient; recompute belongs to the backward. Weights' gradients are
    1 of the 2 where they come later."""
    each = plan.num_microbatches * plan.vpp
    again = terms.get("recompute", 0.0) / each
    rest = sum(s for term, s in terms.items() if term not in ONCE) / each - again
    forward = rest / (3 if plan.trainable == plan.params else 2)
    weights = forward if split and plan.trainable == plan.params else 0.0
    return {"forward": forward, "backward": rest - forward + again - weights, "weights": weights}


def _ready(plan: ComponentPlan, stage: int, op: _Op, done: Mapping[tuple[int, _Op], float]) -> float | None:
    """When what `op` needs is there; None: not yet."""
    needed = _needed(plan, stage, op)
    return 0.0 if needed is None else done.get(needed)


def _needed(plan: ComponentPlan, stage: int, op: _Op) -> tuple[int, _Op] | None:
    last = plan.pp - 1
    if op.weights:
        return stage, _Op(False, op.micro_batch, op.chunk)
    if op.forward:
        if stage > 0:
            return stage - 1, op
        return (last, _Op(True, op.micro_batch, op.chunk - 1)) if op.chunk else None
    if stage < last:
        return stage + 1, op
    if op.chunk < plan.vpp - 1:
        return 0, _Op(False, op.micro_batch, op.chunk + 1)
    return last, _Op(True, op.micro_batch, op.chunk)


def _once(times: Sequence[Mapping[str, float]], start: float) -> Iterator[Span]:
    for stage, terms in enumerate(times):
        at = start
        for what in ONCE:
            seconds = terms.get(what, 0.0)
            if seconds > 0:
                yield Span(stage, what, at, at + seconds)
                at += seconds
