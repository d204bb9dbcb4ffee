"""A head behind the decoder: which of eight classes a sample is of, read at its last tokens."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dslaunch.runtime.data import IGNORE, Batch
from dslaunch.runtime.own import Build
from dslaunch.runtime.tensor_parallel import Shard, at_least_fp32, column, row

CLASSES = 8


class Head(nn.Module):
    reads = True

    def __init__(self, hidden: int, inner: int, shard: Shard) -> None:
        super().__init__()
        self.up = column(hidden, inner, True, shard)
        self.down = row(inner, CLASSES, True, shard)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[B, S, H] -> the cross-entropy, summed over samples that have a label."""
        said = at_least_fp32(self.down(F.gelu(self.up(x))).mean(dim=1))
        missed = F.cross_entropy(said, batch.tokens.sum(dim=1) % CLASSES, reduction="none")
        return missed[_labelled(batch)].sum()

    def judged(self, batch: Batch) -> Tensor:
        return _labelled(batch).sum()


def _labelled(batch: Batch) -> Tensor:
    return (batch.labels != IGNORE).any(dim=1)


def head(build: Build) -> nn.Module:
    width, inner, _ = build.spec["dims"]
    return Head(width, inner, build.piece.shard)
