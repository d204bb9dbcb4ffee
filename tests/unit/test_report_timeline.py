"""The drawn schedule: what each stage waits for, and the bubble that the arithmetic gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dslaunch.planfile import ComponentPlan
from dslaunch.review.timeline import Span, merged, spans

COMPONENT = ComponentPlan(
    tp=1, pp=4, vpp=1, cp=1, ep=1, dp=1, zero=1, offload="none", recompute="none", micro_batch=1,
    num_microbatches=8, rank_offset=0, params=1, trainable=1, lr=0.1, weight_decay=0.0,
    layers_per_stage=(1, 1, 1, 1), stages=(),
)  # fmt: skip
EVEN = [{"compute": 24.0, "dp": 1.0, "optimizer": 0.5}] * 4
"""3 seconds a micro-batch and stage: 1 forward, 2 backward."""


def _passes(found: list[Span]) -> list[Span]:
    return [span for span in found if span.micro_batch >= 0]


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"), [("1f1b", 1, 3), ("gpipe", 1, 3), ("interleaved", 2, 1.5), ("zb-h1", 1, 1)]
)
def test_the_bubble_is_that_of_the_paper(schedule: str, vpp: int, bubble: float) -> None:
    """arXiv:2104.04473: (p - 1) * (forward + backward) / v seconds on top of m * (forward + backward); a third of
    that where the weights' half of the backward pass waits (arXiv:2401.10241)."""
    found = _passes(spans(replace(COMPONENT, vpp=vpp), EVEN, schedule))
    assert max(span.end for span in found) == pytest.approx(24 + 3 * bubble)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)]
)
@pytest.mark.parametrize("m", [1, 3, 4, 8, 12])
def test_nothing_starts_before_what_it_needs(schedule: str, vpp: int, m: int) -> None:
    if vpp > 1 and m % 4:
        pytest.skip("interleaving takes multiples of pp")
    found = _passes(spans(replace(COMPONENT, vpp=vpp, num_microbatches=m), EVEN, schedule))
    assert len(found) == 2 * 4 * vpp * m
    at = {(s.stage, s.what, s.micro_batch, s.chunk): s for s in found}
    for span in found:
        virtual = span.chunk * 4 + span.stage
        forward = at[span.stage, "forward", span.micro_batch, span.chunk]
        assert span.what == "forward" or span.start >= forward.end
        before = virtual - 1 if span.what == "forward" else virtual + 1
        if 0 <= before < 4 * vpp:
            needed = at[before % 4, span.what, span.micro_batch, before // 4]
            assert span.start >= needed.end - 1e-9
    for stage in range(4):
        row = [span for span in found if span.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(row))


def test_1f1b_holds_no_more_micro_batches_than_stages_behind_it() -> None:
    found = _passes(spans(COMPONENT, EVEN, "1f1b"))
    for stage in range(4):
        held = most = 0
        for span in (span for span in found if span.stage == stage):
            held += 1 if span.what == "forward" else -1
            most = max(most, held)
        assert most == 4 - stage


def test_merging_keeps_the_ends_and_the_gaps_that_can_be_seen() -> None:
    found = spans(COMPONENT, EVEN, "1f1b")
    rows = merged(found, 0.5)
    assert max(row.end for row in rows) == max(span.end for span in found)
    assert [row.what for row in rows if row.stage == 0][-2:] == ["dp", "optimizer"]
    first = [row for row in rows if row.stage == 0 and row.what == "work"]
    assert (first[0].start, first[0].end) == (0.0, 4.0)
    assert first[1].start == pytest.approx(10.0)
