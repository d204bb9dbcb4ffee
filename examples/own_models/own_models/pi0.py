"""A pi0-like model: an action expert whose layers attend together with those of the LLM (arXiv:2410.24164).

In each layer the expert's tokens read the LLM's keys and values besides their own; the LLM's tokens do not read
the expert's. The expert turns noise into a chunk of actions by flow matching: of x = t * noise + (1 - t) * actions
it says the velocity, noise - actions. As in pi0.5 (arXiv:2504.16054) the LLM has a loss of its own, here the
answer's, so that what stands behind its last keys and values trains too.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dslaunch.runtime.components import decoder_block
from dslaunch.runtime.data import Batch
from dslaunch.runtime.layers import Attention, BlockShape, FeedForward, Rotation, norm_of, rotate, rotation
from dslaunch.runtime.own import Build, apart, judged_in, side_by_side
from dslaunch.runtime.supported import Spec
from dslaunch.runtime.tensor_parallel import Shard, column, embedding, summed_cross_entropy
from own_models.sums import ACTIONS, EQUALS, IMAGE

EXPERT = "action_expert"
TIMES = 4
"""Sines and cosines of the flow's time, beside each noisy action."""


class Branch(nn.Module):
    """A layer of one of the two, but for attention's core, which is in `Joint`."""

    def __init__(self, shape: BlockShape, shard: Shard) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.norm1 = norm_of(shape.rmsnorm, shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, shard)
        self.norm2 = norm_of(shape.rmsnorm, shape.hidden, shape.norm_eps)
        self.feed_forward = FeedForward(shape, shard)

    def asked(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, heads, tokens, head_dim]."""
        normed, attention = self.norm1(x), self.attention
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        return rotate(query, by), rotate(key, by), value

    def added(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.attention.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.feed_forward(self.norm2(x))
        return y


class Joint(nn.Module):
    """A layer of the LLM and the same layer of the expert. B samples, S tokens of the LLM, A of the expert."""

    def __init__(self, build: Build, llm: BlockShape, expert: BlockShape) -> None:
        super().__init__()
        self.recompute, self.grouped = build.recompute, llm.heads != llm.kv_heads
        self.llm, self.expert = Branch(llm, build.piece.shard), Branch(expert, build.piece.shard)

    def forward(self, x: Tensor, y: Tensor, by: Rotation, seen: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] and y [B, A, h], which come back; `seen` [B, 1, A, S + A] is what the expert reads."""
        if self.recompute == "full":
            out: tuple[Tensor, Tensor] = checkpoint(self._run, x, y, by, seen, use_reentrant=False)
            return out
        return self._run(x, y, by, seen)

    def _run(self, x: Tensor, y: Tensor, by: Rotation, seen: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        ours = self.llm.asked(x, (by[0][:length], by[1][:length]))
        theirs = self.expert.asked(y, (by[0][length:], by[1][length:]))
        if self.recompute == "selective":
            mixed = checkpoint(self._core, *ours, *theirs, seen, use_reentrant=False)
        else:
            mixed = self._core(*ours, *theirs, seen)
        return self.llm.added(x, mixed[0]), self.expert.added(y, mixed[1])

    def _core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
    ) -> tuple[Tensor, Tensor]:
        attention = partial(F.scaled_dot_product_attention, enable_gqa=self.grouped)
        read = attention(query, key, value, is_causal=True)
        both = torch.cat([key, keys], dim=2), torch.cat([value, values], dim=2)
        return read, attention(asked, *both, attn_mask=seen)


class Pi0(nn.Module):
    """One stage of both; the first embeds tokens and takes the noisy actions in, the last has the heads."""

    reads = True

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.piece, self.streams = build.piece, build.streams
        spec, guest = build.spec, build.guests[EXPERT]
        llm, expert = decoder_block(spec, "none"), expert_block(guest, spec["norm_eps"])
        self.theta, self.head_dim, self.chunk = spec["rope_theta"], llm.head_dim, guest["tokens"]
        if self.piece.first:
            self.embedding = embedding(spec["vocab"], llm.hidden, self.piece.shard)
            self.action_in = nn.Linear(ACTIONS + TIMES, expert.hidden)
        self.layers = nn.ModuleDict({str(i): Joint(build, llm, expert) for i in self.piece.layers})
        if self.piece.last:
            self.norm = norm_of(True, llm.hidden, llm.norm_eps)
            self.head = column(llm.hidden, spec["vocab"], False, self.piece.shard)
            self.expert_norm = norm_of(True, expert.hidden, expert.norm_eps)
            self.action_out = nn.Linear(expert.hidden, ACTIONS)

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Features of images [B, M, H], or both streams of the stage before -> both streams, or the loss."""
        if self.piece.first:
            x, y = self._entered(x, batch.tokens), self._noisy(batch)
        else:
            assert x is not None
            x, y = apart(x, self.streams)
        by, seen = rotation(x.shape[1] + self.chunk, self.head_dim, self.theta, x), self._seen(batch.tokens)
        for layer in self.layers.values():
            x, y = layer(x, y, by, seen)
        return self._judged(x, y, batch) if self.piece.last else side_by_side([x, y])

    @property
    def units(self) -> list[nn.Module]:
        return list(self.layers.values())

    def judged(self, batch: Batch) -> Tensor:
        """The loss is a mean over samples."""
        return (batch.tokens == EQUALS).sum()

    def _entered(self, features: Tensor | None, tokens: Tensor) -> Tensor:
        """Embedded tokens; features stand in the places of image tokens, in order."""
        assert features is not None
        x: Tensor = self.embedding(tokens)
        places = tokens == IMAGE
        held = torch.arange(features.shape[1], device=x.device) < places.sum(dim=1)[:, None]
        return x.masked_scatter(places[..., None], features.to(x.dtype)[held])

    def _noisy(self, batch: Batch) -> Tensor:
        """[B, A, h]: actions on their way from noise, each with the time."""
        time = batch.more["time"][:, None, None]
        noisy = time * batch.more["noise"] + (1 - time) * batch.more["actions"]
        angles = time * math.pi * torch.tensor([1.0, 2.0], device=time.device, dtype=time.dtype)
        clock = torch.cat([angles.sin(), angles.cos()], dim=-1).expand(-1, self.chunk, -1)
        y: Tensor = self.action_in(torch.cat([noisy, clock], dim=-1).to(self.action_in.weight.dtype))
        return y

    def _seen(self, tokens: Tensor) -> Tensor:
        """[B, 1, A, S + A]: what is asked, up to "=" and without the answer, and the whole chunk."""
        asked = F.pad((tokens == EQUALS).cumsum(dim=1), (1, -1)) == 0
        return F.pad(asked, (0, self.chunk), value=True)[:, None, None].expand(-1, -1, self.chunk, -1)

    def _judged(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        judged = judged_in(batch.labels)
        logits = self.head(self.norm(x[:, :-1][judged]))
        said = summed_cross_entropy(logits, batch.labels[:, 1:][judged], self.piece.shard)
        velocity = self.action_out(self.expert_norm(y))
        wanted = (batch.more["noise"] - batch.more["actions"]).to(velocity.dtype)
        return said + F.mse_loss(velocity, wanted, reduction="none").mean(dim=(1, 2)).sum()


def expert_block(spec: Spec, norm_eps: float) -> BlockShape:
    """A layer of the expert: as the LLM's, but narrower."""
    return BlockShape(
        hidden=spec["hidden"], heads=spec["heads"], kv_heads=spec["kv_heads"], head_dim=spec["head_dim"],
        ffn=spec["ffn"], gated=True, silu=True, rmsnorm=True, norm_eps=norm_eps, qkv_bias=False, out_bias=False,
        mlp_bias=False, layer_scale=False, causal=False, recompute="none",
    )  # fmt: skip


def decoder(build: Build) -> nn.Module:
    return Pi0(build)
