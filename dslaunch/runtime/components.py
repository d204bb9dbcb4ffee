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
from dslaunch.runtime.supported import Spec

VIT_NORM_EPS = 1e-6


class ViT(nn.Module):
    """A vision transformer; class token and registers run through the blocks and are not passed on."""

    def __init__(self, spec: Spec, recompute: str, from_layer: int) -> None:
        super().__init__()
        self.spec = spec
        hidden, patch = spec["hidden"], spec["patch"]
        patches = (spec["image"] // patch) ** 2
        self.prefix_tokens = int(spec["class_token"]) + spec["registers"]
        self.patch = nn.Conv2d(spec["channels"], hidden, patch, stride=patch, bias=spec["patch_bias"])
        self.class_token = nn.Parameter(torch.empty(1, 1, hidden)) if spec["class_token"] else None
        registers = spec["registers"]
        self.registers = nn.Parameter(torch.empty(1, registers, hidden)) if registers else None
        # As in timm's vit_*_reg4_dinov2: beside registers the class token has no position of its own.
        self.embedded_class = bool(spec["class_token"] and not registers)
        self.positions = nn.Parameter(torch.empty(1, patches + int(self.embedded_class), hidden))
        self.pre_norm = nn.LayerNorm(hidden, eps=VIT_NORM_EPS) if spec["pre_norm"] else nn.Identity()
        self.blocks = nn.ModuleList(Block(vit_block(spec, recompute)) for _ in range(spec["layers"]))
        self.post_norm = nn.LayerNorm(hidden, eps=VIT_NORM_EPS) if spec["post_norm"] else nn.Identity()
        self.pooling = Pooling(vit_block(spec, recompute)) if spec["attention_pooling"] else nn.Identity()
        self.pooling.requires_grad_(False)
        self.used_layers = blocks_up_to(from_layer, spec["layers"])
        if self.used_layers < spec["layers"]:
            # What does not run gets no gradient on any rank; frozen, every strategy treats it alike.
            for unused in (*self.blocks[self.used_layers :], self.post_norm):
                unused.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, image, image] -> [B, N, H]"""
        x = self.patch(images.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = self.pre_norm(self._with_prefix(x))
        for block in self.blocks[: self.used_layers]:
            x = block(x)
        if self.used_layers == len(self.blocks):
            x = self.post_norm(x)
        out: Tensor = x[:, self.prefix_tokens :]
        return out

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

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        dims = spec["dims"]
        self.norm = nn.LayerNorm(dims[0]) if spec["norm"] else nn.Identity()
        pairs = itertools.pairwise(dims)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=spec["bias"]) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, dims[0]] -> [B, S, dims[-1]]"""
        x = self.layers[0](self.norm(x))
        for layer in self.layers[1:]:
            x = layer(F.gelu(x))
        return x


class Decoder(nn.Module):
    """A causal language model whose sequence may start with tokens of other components."""

    def __init__(self, spec: Spec, recompute: str) -> None:
        super().__init__()
        self.spec = spec
        hidden = spec["hidden"]
        shape = decoder_block(spec, recompute)
        self.head_dim = shape.head_dim
        self.embedding = nn.Embedding(spec["vocab"], hidden)
        learned = spec["position"] == "learned"
        self.positions = nn.Parameter(torch.empty(spec["max_positions"], hidden)) if learned else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(spec["layers"]))
        self.norm = norm_of(shape.rmsnorm, hidden, shape.norm_eps)
        self.head = nn.Linear(hidden, spec["vocab"], bias=False)
        if spec["tied_embeddings"]:
            self.head.weight = self.embedding.weight

    def forward(self, prefix: Tensor | None, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over the labels that are not -100.

        prefix [B, P, H] stands before tokens [B, T]; labels [B, T] says for each text token which token
        is to be predicted in its place, so that labels[:, 0] is never used.
        """
        x = self.embedding(tokens)
        if prefix is not None:
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        by = None
        if self.positions is None:
            by = rotation(x.shape[1], self.head_dim, self.spec["rope_theta"], x)
        for block in self.blocks:
            x = block(x, by)
        before = x[:, -tokens.shape[1] : -1]
        wanted = labels[:, 1:]
        judged = wanted != -100
        logits = self.head(self.norm(before[judged]))
        return F.cross_entropy(logits.float(), wanted[judged])


def build_component(spec: Spec, recompute: str, from_layer: int) -> nn.Module:
    """The module of one component, of which layer `from_layer` is passed on (-1: the last)."""
    match spec["arch"]:
        case "vit":
            return ViT(spec, recompute, from_layer)
        case "mlp":
            return Mlp(spec)
        case arch:
            assert arch == "decoder", arch
            return Decoder(spec, recompute)


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
