"""Matrices cut over the ranks of a tensor-parallel group (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

A column-parallel layer holds a slice of its outputs, a row-parallel one a slice of its inputs; between them
nothing is exchanged. A cut parameter carries `tensor_model_parallel`, by which norms count each slice,
`tp_dim`, the dimension that is cut, and `tp_parts`, how many matrices stand one after another in that dimension,
each cut by itself (query, key and value in one matrix: 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """This rank's place in a tensor-parallel group."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, whole: int) -> int:
        """The length of this rank's slice."""
        assert whole % self.size == 0, (whole, self.size)
        return whole // self.size


ALONE = Shard()


class _Copy(torch.autograd.Function):
    """Forward nothing; backward the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.shard.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Forward the sum over the group; backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def copy_to_shards(x: Tensor, shard: Shard) -> Tensor:
    """`x`, equal on all ranks, into what each computes apart: its gradient is the sum of theirs."""
    out: Tensor = x if shard.size == 1 else _Copy.apply(x, shard)  # type: ignore[no-untyped-call]
    return out


def sum_of_shards(x: Tensor, shard: Shard) -> Tensor:
    """The sum over the group, equal on all ranks; each gets its whole gradient."""
    out: Tensor = x if shard.size == 1 else _Sum.apply(x, shard)  # type: ignore[no-untyped-call]
    return out


class ColumnLinear(nn.Linear):
    """[.., inputs] -> [.., outputs / size]"""

    def __init__(self, inputs: int, outputs: int, bias: bool, shard: Shard) -> None:
        super().__init__(inputs, shard.part(outputs), bias=bias)
        self.shard = shard
        mark(self.weight, 0)
        if bias:
            mark(self.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to_shards(x, self.shard))


class FusedColumnLinear(ColumnLinear):
    """[.., inputs] -> [.., outputs / size]: `parts` matrices in one, of each of which a rank holds its slice."""

    def __init__(self, inputs: int, outputs: int, bias: bool, parts: int, shard: Shard) -> None:
        super().__init__(inputs, outputs, bias, shard)
        mark(self.weight, 0, parts)
        if bias:
            mark(self.bias, 0, parts)


class RowLinear(nn.Linear):
    """[.., inputs / size] -> [.., outputs]; the bias is whole, and added once."""

    def __init__(self, inputs: int, outputs: int, bias: bool, shard: Shard) -> None:
        super().__init__(shard.part(inputs), outputs, bias=bias)
        self.shard = shard
        mark(self.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = sum_of_shards(F.linear(x, self.weight), self.shard)
        return total if self.bias is None else total + self.bias


class SharedColumnLinear(nn.Linear):
    """[.., inputs] -> [.., outputs / pieces]: fewer pieces (key or value heads) than ranks.

    The matrix is whole on each rank, which computes the piece that its queries read.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, pieces: int, shard: Shard) -> None:
        assert shard.size % pieces == 0, (shard.size, pieces)
        super().__init__(inputs, outputs, bias=bias)
        self.shard = shard
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        weight = self._piece(self.weight)
        bias = None if self.bias is None else self._piece(self.bias)
        return F.linear(copy_to_shards(x, self.shard), weight, bias)

    def _piece(self, whole: Tensor) -> Tensor:
        which = self.shard.rank * self.pieces // self.shard.size
        return copy_to_shards(whole, self.shard).chunk(self.pieces)[which]


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which each rank holds a slice of the vocabulary."""

    def __init__(self, vocab: int, hidden: int, shard: Shard) -> None:
        super().__init__(shard.part(vocab), hidden)
        self.shard = shard
        mark(self.weight, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        local, held = in_slice(tokens, self.num_embeddings, self.shard)
        return sum_of_shards(super().forward(local) * held[..., None], self.shard)


def column(inputs: int, outputs: int, bias: bool, shard: Shard) -> nn.Linear:
    return (
        nn.Linear(inputs, outputs, bias=bias)
        if shard.size == 1
        else ColumnLinear(inputs, outputs, bias, shard)
    )


def column_in_pieces(inputs: int, outputs: int, bias: bool, pieces: int, shard: Shard) -> nn.Linear:
    """A column-parallel layer whose outputs are `pieces` that are not cut."""
    if pieces % shard.size == 0:
        return column(inputs, outputs, bias, shard)
    return SharedColumnLinear(inputs, outputs, bias, pieces, shard)


def row(inputs: int, outputs: int, bias: bool, shard: Shard) -> nn.Linear:
    return (
        nn.Linear(inputs, outputs, bias=bias) if shard.size == 1 else RowLinear(inputs, outputs, bias, shard)
    )


def embedding(vocab: int, hidden: int, shard: Shard) -> nn.Embedding:
    return nn.Embedding(vocab, hidden) if shard.size == 1 else VocabularyEmbedding(vocab, hidden, shard)


def in_slice(tokens: Tensor, held: int, shard: Shard) -> tuple[Tensor, Tensor]:
    """(position in this rank's slice of `held` entries, or 0; whether it is there)"""
    local = tokens - shard.rank * held
    inside = (local >= 0) & (local < held)
    return local.where(inside, 0), inside


def summed_cross_entropy(logits: Tensor, wanted: Tensor, shard: Shard) -> Tensor:
    """The sum of the cross-entropy over n tokens.

    logits [n, vocab / size] are this rank's slice; wanted [n] are numbers in the whole vocabulary.
    """
    logits = at_least_fp32(logits)
    if shard.size == 1:
        return F.cross_entropy(logits, wanted, reduction="sum")
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    logits = logits - largest[:, None]
    local, held = in_slice(wanted, logits.shape[-1], shard)
    chosen = sum_of_shards(logits.gather(-1, local[:, None])[:, 0] * held, shard)
    total = sum_of_shards(logits.exp().sum(dim=-1), shard)
    return (total.log() - chosen).sum()


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mark(parameter: Tensor, dim: int, parts: int = 1) -> None:
    """Say that `parameter` is cut over the tensor-parallel group along `dim`, each of `parts` parts by itself."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.tp_dim = dim  # type: ignore[attr-defined]
    parameter.tp_parts = parts  # type: ignore[attr-defined]


def slice_for(whole: Tensor, parameter: nn.Parameter, shard: Shard) -> Tensor:
    """The part of `whole` that `parameter` holds on this rank."""
    dim = getattr(parameter, "tp_dim", None)
    if dim is None:
        return whole
    slices = [part.chunk(shard.size, dim)[shard.rank] for part in whole.chunk(parts_of(parameter), dim)]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


def parts_of(parameter: Tensor) -> int:
    """Into how many matrices `parameter` falls before it is cut."""
    return int(getattr(parameter, "tp_parts", 1))


def put_together(slices: list[Tensor], dim: int, parts: int) -> Tensor:
    """The whole matrix from the slices of all shards, in their order: what `slice_for` has cut."""
    pieces = [piece.chunk(parts, dim) for piece in slices]
    return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
