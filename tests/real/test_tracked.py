"""Tensors that ranks of dslaunch.runtime hold at their fullest, against the memory ledger."""

from __future__ import annotations

import pytest

from tests.real.parts import need

need("torch", "deepspeed", "sklearn")

from benchmarks.tracked import APART, LAYOUTS, TOWER, measured  # noqa: E402

WITHIN = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("words", [each for each in LAYOUTS if each != TOWER])
def test_ranks_hold_what_the_ledger_says(words: str) -> None:
    """Of the decoder's ranks: two hold a tower of a MiB alone where it stands apart."""
    ranks = measured(words.split())[2 if words == APART else 0 :]
    assert [rank.ratio for rank in ranks] == pytest.approx([1.0] * len(ranks), abs=WITHIN)
