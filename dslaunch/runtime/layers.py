"""Transformer layers that the tower and the decoder share. Shapes: B samples, S tokens, H hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dslaunch.runtime.tensor_parallel import ALONE, Shard, at_least_fp32, column, column_in_pieces, row

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary embedding, each [S, head_dim]."""


@dataclass(frozen=True)
class BlockShape:
    """What one pre-norm transformer block is made of."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    silu: bool
    """SiLU, else GELU."""
    rmsnorm: bool
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    layer_scale: bool
    causal: bool
    recompute: str
    """none | selective (attention's core) | full (the block)"""


def norm_of(rmsnorm: bool, width: int, eps: float) -> nn.Module:
    """RMSNorm (a weight), or LayerNorm (a weight and a bias)."""
    return nn.RMSNorm(width, eps=eps) if rmsnorm else nn.LayerNorm(width, eps=eps)


def rotation(length: int, head_dim: int, theta: float, like: Tensor) -> Rotation:
    """The rotary embedding of positions 0..length-1 in fp32 (Su et al. 2021, arXiv:2104.09864).

    The halves of a head rotate together, as in Llama: pair i is (x[i], x[i + head_dim/2]).
    """
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angle = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """`x` [B, heads, S, head_dim] turned by the angles of its positions."""
    wide = at_least_fp32(x)
    first, second = wide.chunk(2, dim=-1)
    turned = wide * by[0] + torch.cat([-second, first], dim=-1) * by[1]
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; kv_heads = heads is multi-head attention."""

    def __init__(self, shape: BlockShape, shard: Shard = ALONE) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query = column(shape.hidden, width, shape.qkv_bias, shard)
        self.key = column_in_pieces(shape.hidden, kv_width, shape.qkv_bias, shape.kv_heads, shard)
        self.value = column_in_pieces(shape.hidden, kv_width, shape.qkv_bias, shape.kv_heads, shard)
        self.out = row(width, shape.hidden, shape.out_bias, shard)

    def forward(self, x: Tensor, by: Rotation | None) -> Tensor:
        """[B, S, H] -> [B, S, H]; `by` turns queries and keys where positions are rotary."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if by is not None:
            query, key = rotate(query, by), rotate(key, by)
        if self.shape.recompute == "selective":
            mixed = checkpoint(self._core, query, key, value, use_reentrant=False)
        else:
            mixed = self._core(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim).transpose(1, 2)

    def _core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = self.shape.kv_heads != self.shape.heads
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=self.shape.causal, enable_gqa=grouped
        )


class FeedForward(nn.Module):
    """Two matrices, or three where it is gated (SwiGLU, GeGLU: Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: BlockShape, shard: Shard = ALONE) -> None:
        super().__init__()
        self.activation = F.silu if shape.silu else F.gelu
        self.gate = column(shape.hidden, shape.ffn, shape.mlp_bias, shard) if shape.gated else None
        self.up = column(shape.hidden, shape.ffn, shape.mlp_bias, shard)
        self.down = row(shape.ffn, shape.hidden, shape.mlp_bias, shard)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        inner = self.up(x)
        inner = self.activation(inner) if self.gate is None else self.activation(self.gate(x)) * inner
        out: Tensor = self.down(inner)
        return out


class LayerScale(nn.Module):
    """A learnt scale per channel (Touvron et al. 2021, arXiv:2103.17239)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). FSDP2 shards and `full` recomputes by block."""

    def __init__(self, shape: BlockShape, shard: Shard = ALONE) -> None:
        super().__init__()
        self.recompute = shape.recompute
        self.norm1 = norm_of(shape.rmsnorm, shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, shard)
        self.scale1 = LayerScale(shape.hidden) if shape.layer_scale else nn.Identity()
        self.norm2 = norm_of(shape.rmsnorm, shape.hidden, shape.norm_eps)
        self.feed_forward = FeedForward(shape, shard)
        self.scale2 = LayerScale(shape.hidden) if shape.layer_scale else nn.Identity()

    def forward(self, x: Tensor, by: Rotation | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        if self.recompute == "full":
            out: Tensor = checkpoint(self._run, x, by, use_reentrant=False)
            return out
        return self._run(x, by)

    def _run(self, x: Tensor, by: Rotation | None) -> Tensor:
        x = x + self.scale1(self.attention(self.norm1(x), by))
        y: Tensor = x + self.scale2(self.feed_forward(self.norm2(x)))
        return y
