"""The widths of a transformer block and of an MLP on one tensor-parallel rank, and which splits are whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dslaunch.errors import listed
from dslaunch.schema.model import Component, Decoder, Mlp, ViT


@dataclass(frozen=True)
class Block:
    """One transformer layer, whichever component it stands in. Widths in elements, before any split."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    """The MLP has two column-parallel halves (SwiGLU, GeGLU)."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    norm_bias: bool
    """LayerNorm; an RMSNorm has a weight only."""
    layer_scale: bool
    causal: bool

    @property
    def halves(self) -> int:
        """Column-parallel matrices of the MLP."""
        return 2 if self.gated else 1

    @property
    def norm(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm_bias else 1)

    def query_width(self, tp: int) -> int:
        """Output width of the query projection on one rank."""
        return divided(self.heads, tp) * self.head_dim

    def kv_width(self, tp: int) -> int:
        """Output width of the key (or value) projection on one rank; replicas where tp > kv_heads."""
        assert self.kv_heads % tp == 0 or tp % self.kv_heads == 0, f"kv_heads {self.kv_heads}, tp {tp}"
        return max(1, self.kv_heads // tp) * self.head_dim

    def ffn_width(self, tp: int) -> int:
        """Width of one half of the MLP's inner layer on one rank."""
        return divided(self.ffn, tp)


@dataclass(frozen=True)
class Linear:
    """One linear layer of an MLP, and how tensor parallelism cuts it.

    Layers come in pairs: the first is cut by its output (column-parallel), the second by its input
    (row-parallel). An odd last layer is cut by its input too, so that each matrix is divided by tp.
    """

    width_in: int
    width_out: int
    column: bool
    last: bool
    """No activation function follows."""

    @property
    def cut(self) -> int:
        """The width that tp must divide."""
        return self.width_out if self.column else self.width_in


def block(component: Decoder | ViT) -> Block:
    """The layer that the component repeats. A ViT's has biases and LayerNorm throughout."""
    if isinstance(component, Decoder):
        return Block(
            hidden=component.hidden,
            heads=component.heads,
            kv_heads=component.kv_heads,
            head_dim=component.head_dim or divided(component.hidden, component.heads),
            ffn=component.ffn,
            gated=component.gated_mlp,
            qkv_bias=component.qkv_bias,
            out_bias=component.out_bias,
            mlp_bias=component.mlp_bias,
            norm_bias=component.norm == "layernorm",
            layer_scale=False,
            causal=True,
        )
    return Block(
        hidden=component.hidden,
        heads=component.heads,
        kv_heads=component.heads,
        head_dim=divided(component.hidden, component.heads),
        ffn=component.ffn,
        gated=component.gated_mlp,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        layer_scale=component.layer_scale,
        causal=False,
    )


def linears(component: Mlp) -> tuple[Linear, ...]:
    """The MLP's linear layers, first to last."""
    last = len(component.dims) - 2
    return tuple(
        Linear(width_in, width_out, column=i % 2 == 0 and i < last, last=i == last)
        for i, (width_in, width_out) in enumerate(pairwise(component.dims))
    )


def divided(width: int, parts: int) -> int:
    """width / parts, which must be whole: `legal_tp` tells a user before anything is divided."""
    assert width % parts == 0, f"{width} / {parts} is not whole"
    return width // parts


def layers(component: Component) -> int:
    """Layers that pipeline stages can share out; an MLP is one, which can't be split."""
    return 1 if isinstance(component, Mlp) else component.layers


def legal_tp(component: Component, tp: int, most: int | None = None) -> str | None:
    """None where tp divides the component evenly, else the arithmetic and every tp up to `most` that does."""
    faults = _tp_faults(component, tp)
    if not faults:
        return None
    widest = math.gcd(*_cut_widths(component).values())
    legal = [n for n in divisors(widest) if n <= (most or n) and not _tp_faults(component, n)]
    return f"{'; '.join(faults)}; tp can be {listed(legal)}"


def legal_pp(component: Component, pp: int, vpp: int, layers_per_stage: Iterable[int] | None) -> str | None:
    """None where the layers fill pp stages of vpp parts each, else the arithmetic and the splits that do.

    Args:
        layers_per_stage: layers of each of the pp stages, first to last; None asks for an equal split.
    """
    total = layers(component)
    if isinstance(component, Mlp):
        if pp * vpp == 1:
            return None
        return f"an MLP is not cut into stages, found pp {pp} x vpp {vpp}; pp and vpp can be 1"
    if layers_per_stage is None:
        return _equal_split(total, pp, vpp)
    stages = tuple(layers_per_stage)
    if len(stages) != pp:
        return f"layers_per_stage has {len(stages)} counts, but pp is {pp}; give one count per stage"
    if sum(stages) != total:
        found = " + ".join(str(n) for n in stages)
        return f"layers_per_stage: {found} = {sum(stages)}, but there are {total} layers to share out"
    uneven = [n for n in stages if n % vpp]
    if uneven:
        return f"layers_per_stage: {listed(uneven)} / vpp {vpp} is not whole; give multiples of {vpp}"
    return None


def divisors(number: int) -> list[int]:
    """Every divisor, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _equal_split(total: int, pp: int, vpp: int) -> str | None:
    if total % (pp * vpp) == 0:
        return None
    parts = f"pp {pp}" if vpp == 1 else f"(pp {pp} x vpp {vpp})"
    allowed = "pp" if vpp == 1 else "pp x vpp"
    return (
        f"layers {total} / {parts} = {total / (pp * vpp):.4g} is not whole; {allowed} can be "
        f"{listed(divisors(total))}, or give layers_per_stage with {pp} counts that add up to {total}"
    )


def _cut_widths(component: Component) -> dict[str, int]:
    """What tp must divide, by name. Vocabularies are padded instead, kv heads replicated."""
    if isinstance(component, Mlp):
        return {f"width {linear.cut}": linear.cut for linear in linears(component)}
    return {f"heads {component.heads}": component.heads, f"ffn {component.ffn}": component.ffn}


def _tp_faults(component: Component, tp: int) -> list[str]:
    faults = [
        f"{name} / tp {tp} = {width / tp:.4g} is not whole"
        for name, width in _cut_widths(component).items()
        if width % tp
    ]
    kv = component.kv_heads if isinstance(component, Decoder) else tp
    if kv % tp and tp % kv:
        faults.append(f"kv_heads {kv} and tp {tp}: neither divides the other")
    return faults
