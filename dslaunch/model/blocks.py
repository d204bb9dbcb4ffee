"""One transformer layer of any component, as the widths that all arithmetic runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dslaunch.schema.components import Decoder, Transformer, ViT
from dslaunch.schema.layer import Experts, LatentAttention, Mamba, Window

Layered = Decoder | Transformer | ViT


@dataclass(frozen=True)
class Attention:
    """One attention of a layer. Widths in elements, before any split."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    reads: int
    """Width of the tokens that keys and values are projected from: hidden for self-attention."""
    cross: bool
    """Keys and values are another component's tokens."""
    qkv_bias: bool
    out_bias: bool
    qk_norm: int
    """Parameters of the norm on a query head, and of that on a key head; 0: there are none."""
    causal: bool
    window: int
    """Keys that a query sees; 0: all."""
    mla: LatentAttention | None
    sinks: bool = False
    """A learnt number for each head."""

    def query_width(self, tp: int) -> int:
        """Output width of the query projection on one rank."""
        return divided(self.heads, tp) * self.head_dim

    def value_width(self, tp: int) -> int:
        """Input width of the output projection on one rank."""
        return divided(self.heads, tp) * self.value_dim

    def kv_width(self, tp: int) -> int:
        """Output width of key and value projections together on one rank; replicas where tp > kv_heads."""
        assert self.kv_heads % tp == 0 or tp % self.kv_heads == 0, f"kv_heads {self.kv_heads}, tp {tp}"
        return max(1, self.kv_heads // tp) * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Block:
    """One layer: attentions or a state space, then an MLP, a mixture of experts, or both. Widths before any
    split."""

    hidden: int
    attentions: tuple[Attention, ...]
    ffn: int
    """Inner width of the MLP that every token goes through (the shared experts'); 0: there is none."""
    gated: bool
    """The MLP has two column-parallel halves (SwiGLU, GeGLU)."""
    mlp_bias: bool
    experts: Experts | None
    norms: int
    """Norms of hidden width."""
    norm: int
    """Parameters of one norm of hidden width."""
    context_norm: int
    """Parameters of the norm on the tokens that cross-attention reads."""
    layer_scale: bool
    modulation: int
    """Vectors of hidden width that adaptive norms take from the condition."""
    condition: int
    """Width of that condition."""
    mamba: Mamba | None = None

    @property
    def branches(self) -> int:
        """Parts whose output is added to the layer's input."""
        mixers = len(self.attentions) + (self.mamba is not None)
        return mixers + (self.ffn > 0 or self.experts is not None)

    @property
    def expert_width(self) -> int:
        """Width of the tokens that go to routed experts."""
        assert self.experts is not None
        return self.experts.latent or self.hidden

    @property
    def halves(self) -> int:
        """Column-parallel matrices of the MLP."""
        return 2 if self.gated else 1


def divided(width: int, parts: int) -> int:
    """width / parts, which must be whole: `shapes.legal_tp` tells a user before anything is divided."""
    assert width % parts == 0, f"{width} / {parts} is not whole"
    return width // parts


@lru_cache(maxsize=512)
def blocks(component: Layered) -> tuple[Block, ...]:
    """Every layer of the component, first to last."""
    if isinstance(component, Transformer):
        return tuple(_transformer_block(component, layer) for layer in range(component.layers))
    if isinstance(component, ViT):
        return tuple(_vit_block(component, layer) for layer in range(component.layers))
    every = tuple(_decoder_block(component, layer) for layer in range(component.layers))
    if not component.pattern:
        return every
    return tuple(_only(component, whole, letter) for whole, letter in zip(every, component.pattern, strict=True))


def further_layers(component: Decoder) -> tuple[int, ...]:
    """Layers that the parts of one layer that predicts a further token are like, first to last."""
    if not component.mtp_pattern:
        return (component.layers - 1,)
    return tuple(component.pattern.index(letter) for letter in component.mtp_pattern)


def further_blocks(component: Decoder) -> tuple[Block, ...]:
    """Those parts."""
    return tuple(blocks(component)[layer] for layer in further_layers(component))


def head_dim(component: Layered) -> int:
    """Width of one head."""
    return component.head_dim or divided(component.hidden, component.heads)


def _window(window: Window | None, layer: int) -> int:
    if window is None or (window.full_every and (layer + 1) % window.full_every == 0):
        return 0
    return window.tokens


def _decoder_block(component: Decoder, layer: int) -> Block:
    mla, experts = component.mla, component.experts
    width = head_dim(component) if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    attention = Attention(
        hidden=component.hidden,
        heads=component.heads,
        kv_heads=component.kv_heads,
        head_dim=width,
        value_dim=width if mla is None else mla.v_head_dim,
        reads=component.hidden,
        cross=False,
        qkv_bias=component.qkv_bias,
        out_bias=component.out_bias,
        qk_norm=_norm(component.norm, width) if component.qk_norm else 0,
        causal=True,
        window=_window(component.window, layer),
        mla=mla,
        sinks=component.sinks,
    )
    mixed = experts if experts and layer >= experts.dense_layers else None
    return Block(
        hidden=component.hidden,
        attentions=(attention,),
        ffn=mixed.shared_ffn if mixed else component.ffn,
        gated=component.gated_mlp,
        mlp_bias=component.mlp_bias,
        experts=mixed,
        norms=4 if component.post_norms else 2,
        norm=_norm(component.norm, component.hidden),
        context_norm=0,
        layer_scale=False,
        modulation=0,
        condition=0,
    )


def _only(component: Decoder, whole: Block, letter: str) -> Block:
    """The one part of a layer that a letter of the pattern names, under its own norm."""
    alone = replace(whole, attentions=(), ffn=0, experts=None, norms=whole.norms // 2)
    if letter == "*":
        return replace(alone, attentions=whole.attentions)
    if letter == "M":
        return replace(alone, mamba=component.mamba)
    if letter == "-":
        return replace(alone, ffn=component.ffn)
    assert component.experts is not None
    return replace(alone, experts=component.experts, ffn=component.experts.shared_ffn)


def _vit_block(component: ViT, layer: int) -> Block:
    width = head_dim(component)
    attention = Attention(
        hidden=component.hidden,
        heads=component.heads,
        kv_heads=component.heads,
        head_dim=width,
        value_dim=width,
        reads=component.hidden,
        cross=False,
        qkv_bias=component.qkv_bias,
        out_bias=component.out_bias,
        qk_norm=_norm(component.norm, width) if component.qk_norm else 0,
        causal=False,
        window=_window(component.window, layer),
        mla=None,
    )
    return Block(
        hidden=component.hidden,
        attentions=(attention,),
        ffn=component.ffn,
        gated=component.gated_mlp,
        mlp_bias=component.mlp_bias,
        experts=None,
        norms=2,
        norm=_norm(component.norm, component.hidden),
        context_norm=0,
        layer_scale=component.layer_scale,
        modulation=0,
        condition=0,
    )


def _transformer_block(component: Transformer, layer: int) -> Block:
    width, hidden, cross = head_dim(component), component.hidden, component.cross
    own = Attention(
        hidden=hidden,
        heads=component.heads,
        kv_heads=component.kv_heads or component.heads,
        head_dim=width,
        value_dim=width,
        reads=hidden,
        cross=False,
        qkv_bias=component.qkv_bias,
        out_bias=component.out_bias,
        qk_norm=_norm(component.norm, width) if component.qk_norm else 0,
        causal=component.causal,
        window=_window(component.window, layer),
        mla=None,
    )
    attentions: tuple[Attention, ...] = (own,)
    if cross and layer >= cross.first and (layer - cross.first) % cross.every == 0:
        other = replace(own, reads=cross.width, cross=True, qkv_bias=cross.bias, causal=False, window=0)
        attentions = (other,) if cross.instead else (own, other)
    norm = _norm(component.norm, hidden) if component.norm_affine else 0
    reads_other = any(attention.cross for attention in attentions)
    branches = len(attentions) + (component.ffn > 0)
    context_norm = _norm(component.norm, cross.width) if cross and cross.context_norm and reads_other else 0
    modulation = component.modulation
    return Block(
        hidden=hidden,
        attentions=attentions,
        ffn=component.ffn,
        gated=component.gated_mlp,
        mlp_bias=component.mlp_bias,
        experts=None,
        norms=branches * (2 if component.post_norms else 1),
        norm=norm,
        context_norm=context_norm,
        layer_scale=False,
        modulation=modulation.factors if modulation else 0,
        condition=modulation.width if modulation else 0,
    )


def _norm(kind: str, width: int) -> int:
    """Parameters of one norm: an RMSNorm has a weight only."""
    return width * (2 if kind == "layernorm" else 1)
