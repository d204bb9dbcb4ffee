"""The components of a model as modules, built from the validated configuration in plan.json.

Each holds exactly the parameters that its configuration describes.
Shapes: B samples, N patches, S tokens, H hidden.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dslaunch.runtime.layers import Attention, Block, BlockShape, FeedForward, norm_of, rotation
from dslaunch.runtime.own import Piece, judged_in
from dslaunch.runtime.supported import Spec
from dslaunch.runtime.tensor_parallel import ALONE, Shard, column, embedding, row, summed_cross_entropy

VIT_NORM_EPS = 1e-6


def whole(spec: Spec) -> Piece:
    return Piece(range(spec.get("layers", 0)))


class ViT(nn.Module):
    """A vision transformer; class token and registers run through the blocks and are not passed on."""

    def __init__(self, spec: Spec, recompute: str, from_layer: int, piece: Piece) -> None:
        super().__init__()
        self.piece = piece
        self.prefix_tokens = int(spec["class_token"]) + spec["registers"]
        # As in timm's vit_*_reg4_dinov2: beside registers the class token has no position of its own.
        self.embedded_class = bool(spec["class_token"] and not spec["registers"])
        self.used_layers = blocks_up_to(from_layer, spec["layers"])
        if piece.first:
            self._make_entrance(spec)
        shape = vit_block(spec, recompute)
        self.blocks = nn.ModuleDict({str(i): Block(shape, piece.shard) for i in piece.layers})
        if piece.last:
            hidden = spec["hidden"]
            norm = nn.LayerNorm(hidden, eps=VIT_NORM_EPS)
            self.post_norm = norm if spec["post_norm"] else nn.Identity()
            self.pooling = Pooling(shape) if spec["attention_pooling"] else nn.Identity()
            self.pooling.requires_grad_(False)
        if self.used_layers < spec["layers"]:
            # What does not run gets no gradient on any rank; frozen, every strategy treats it alike.
            for unused in [self.blocks[str(i)] for i in piece.layers if i >= self.used_layers]:
                unused.requires_grad_(False)
            if piece.last:
                self.post_norm.requires_grad_(False)

    def _make_entrance(self, spec: Spec) -> None:
        hidden, patch = spec["hidden"], spec["patch"]
        patches = (spec["image"] // patch) ** 2
        self.patch = nn.Conv2d(spec["channels"], hidden, patch, stride=patch, bias=spec["patch_bias"])
        self.class_token = nn.Parameter(torch.empty(1, 1, hidden)) if spec["class_token"] else None
        registers = spec["registers"]
        self.registers = nn.Parameter(torch.empty(1, registers, hidden)) if registers else None
        self.positions = nn.Parameter(torch.empty(1, patches + int(self.embedded_class), hidden))
        self.pre_norm = nn.LayerNorm(hidden, eps=VIT_NORM_EPS) if spec["pre_norm"] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, image, image], or what the stage before gives -> [B, N, H].

        Between stages x is [B, prefix_tokens + N, H].
        """
        if self.piece.first:
            x = self.patch(x.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
            x = self.pre_norm(self._with_prefix(x))
        for number, block in self.blocks.items():
            if int(number) < self.used_layers:
                x = block(x)
        if not self.piece.last:
            return x
        if self.used_layers > self.piece.layers[-1]:
            x = self.post_norm(x)
        return x[:, self.prefix_tokens :]

    def _with_prefix(self, patches: Tensor) -> Tensor:
        """[B, N, H] -> [B, class token + registers + N, H], with positions."""
        tokens = [token for token in (self.class_token, self.registers) if token is not None]
        prefix = [token.expand(len(patches), -1, -1).to(patches.dtype) for token in tokens]
        if self.embedded_class:
            return torch.cat([*prefix, patches], dim=1) + self.positions
        return torch.cat([*prefix, patches + self.positions], dim=1)


class Pooling(nn.Module):
    """SigLIP's attention pooling: held with the weights, never run, since patch tokens are what is passed on."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, 1, shape.hidden))
        self.attention = Attention(shape)
        self.norm = norm_of(shape.rmsnorm, shape.hidden, shape.norm_eps)
        self.feed_forward = FeedForward(shape)


class Mlp(nn.Module):
    """Linear layers with GELU between them, applied to each token."""

    def __init__(self, spec: Spec, shard: Shard) -> None:
        super().__init__()
        dims = spec["dims"]
        self.norm = nn.LayerNorm(dims[0]) if spec["norm"] else nn.Identity()
        self.layers = nn.ModuleList()
        last = len(dims) - 2
        for number, (a, b) in enumerate(itertools.pairwise(dims)):
            # Column- and row-parallel in turn; a last layer without a partner is whole on each rank.
            alone = ALONE if number == last and number % 2 == 0 else shard
            self.layers.append((row if number % 2 else column)(a, b, spec["bias"], alone))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, dims[0]] -> [B, S, dims[-1]]"""
        x = self.layers[0](self.norm(x))
        for layer in self.layers[1:]:
            x = layer(F.gelu(x))
        return x


class Decoder(nn.Module):
    """A causal language model whose sequence may start with tokens of other components.

    Where a head reads it, it passes on its last tokens, normed, and makes no loss; its own head then never runs.
    """

    def __init__(self, spec: Spec, recompute: str, piece: Piece, passes_on: int) -> None:
        """
        Args:
            passes_on: how many tokens a head reads; 0: there is none.
        """
        super().__init__()
        self.piece, self.passes_on = piece, passes_on
        self.rope_theta = spec["rope_theta"]
        hidden, shard = spec["hidden"], piece.shard
        shape = decoder_block(spec, recompute)
        self.head_dim = shape.head_dim
        self.rotary = spec["position"] == "rope"
        if piece.first:
            self.embedding = embedding(spec["vocab"], hidden, shard)
            places = None if self.rotary else nn.Parameter(torch.empty(spec["max_positions"], hidden))
            self.positions = places
        self.blocks = nn.ModuleDict({str(i): Block(shape, shard) for i in piece.layers})
        if piece.last:
            self.norm = norm_of(shape.rmsnorm, hidden, shape.norm_eps)
            self.head = column(hidden, spec["vocab"], False, shard)
            if spec["tied_embeddings"]:
                self.head.weight = self.embedding.weight
            elif passes_on:
                self.head.requires_grad_(False)

    def forward(self, x: Tensor | None, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """The cross-entropy summed over the labels that are not -100; before the last stage, or a head, what it
        passes on.

        The first stage gets as x the prefix [B, P, H] that stands before tokens [B, T], later ones [B, P + T, H].
        labels [B, T] says for each text token which token is to be predicted in its place, so that labels[:, 0]
        is never used. The first stage reads tokens, the last one labels.
        """
        if self.piece.first:
            assert tokens is not None
            x = self._entered(x, tokens)
        assert x is not None
        by = rotation(x.shape[1], self.head_dim, self.rope_theta, x) if self.rotary else None
        for block in self.blocks.values():
            x = block(x, by)
        if not self.piece.last:
            return x
        if self.passes_on:
            normed: Tensor = self.norm(x[:, -self.passes_on :])
            return normed
        assert labels is not None
        return self._judged(x, labels)

    def _entered(self, prefix: Tensor | None, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if prefix is not None:
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        return x if self.positions is None else x + self.positions[: x.shape[1]]

    def _judged(self, x: Tensor, labels: Tensor) -> Tensor:
        judged = judged_in(labels)
        logits = self.head(self.norm(x[:, -labels.shape[1] : -1][judged]))
        return summed_cross_entropy(logits, labels[:, 1:][judged], self.piece.shard)


def build_component(
    spec: Spec, recompute: str, from_layer: int, piece: Piece | None = None, passes_on: int = 0
) -> nn.Module:
    """The module of one component, of which layer `from_layer` is passed on (-1: the last).

    Args:
        piece: what this rank holds of it; None: all.
        passes_on: tokens that it passes on; 0: no component reads it.
    """
    piece = piece or whole(spec)
    match spec["arch"]:
        case "vit":
            return ViT(spec, recompute, from_layer, piece)
        case "mlp":
            return Mlp(spec, piece.shard)
        case arch:
            assert arch == "decoder", arch
            return Decoder(spec, recompute, piece, passes_on)


def blocks_up_to(from_layer: int, layers: int) -> int:
    """Blocks to run for the output of `from_layer`: -1 is the last, -2 the one before; 0 is the first."""
    return from_layer + 1 if from_layer >= 0 else layers + 1 + from_layer


def vit_block(spec: Spec, recompute: str) -> BlockShape:
    """A ViT's block: every linear layer has a bias; the gated one uses SiLU (DINOv2's SwiGLU)."""
    return BlockShape(
        hidden=spec["hidden"], heads=spec["heads"], kv_heads=spec["heads"],
        head_dim=spec.get("head_dim") or spec["hidden"] // spec["heads"], ffn=spec["ffn"],
        gated=spec["gated_mlp"], silu=spec["gated_mlp"], rmsnorm=False, norm_eps=VIT_NORM_EPS,
        qkv_bias=True, out_bias=True, mlp_bias=True, layer_scale=spec["layer_scale"], causal=False,
        recompute=recompute,
    )  # fmt: skip


def decoder_block(spec: Spec, recompute: str) -> BlockShape:
    """A decoder's block: SwiGLU where it is gated, else GELU."""
    return BlockShape(
        hidden=spec["hidden"], heads=spec["heads"], kv_heads=spec["kv_heads"],
        head_dim=spec["head_dim"] or spec["hidden"] // spec["heads"], ffn=spec["ffn"],
        gated=spec["gated_mlp"], silu=spec["gated_mlp"], rmsnorm=spec["norm"] == "rmsnorm",
        norm_eps=spec["norm_eps"], qkv_bias=spec["qkv_bias"], out_bias=spec["out_bias"],
        mlp_bias=spec["mlp_bias"], layer_scale=False, causal=True, recompute=recompute,
    )  # fmt: skip
