"""Which splits of a component are whole, and what a user is told of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dslaunch.errors import listed
from dslaunch.model.blocks import blocks
from dslaunch.model.matrices import mlp_matrices
from dslaunch.schema.components import Component, Decoder, Mlp, Other


def layers(component: Component) -> int:
    """Layers that pipeline stages can share out; an MLP or another network is one, which can't be split."""
    return 1 if isinstance(component, Mlp | Other) else component.layers


def width_out(component: Component) -> int:
    """Width of the tokens that the component passes on."""
    return component.dims[-1] if isinstance(component, Mlp) else component.hidden


def legal_tp(
    component: Component, tp: int, most: int | None = None, *, experts_apart: bool = False
) -> str | None:
    """None where tp divides the component evenly, else the arithmetic and every tp up to `most` that does.

    Args:
        experts_apart: routed experts have an etp of their own, and tp does not cut them.
    """
    widths = _cut_widths(component, experts_apart)
    faults = _tp_faults(component, widths, tp)
    if not faults:
        return None
    widest = math.gcd(*widths.values())
    legal = [n for n in divisors(widest) if n <= (most or n) and not _tp_faults(component, widths, n)]
    return f"{'; '.join(faults)}; tp can be {listed(legal)}"


def legal_pp(component: Component, pp: int, vpp: int, layers_per_stage: Iterable[int] | None) -> str | None:
    """None where the layers fill pp stages of vpp parts each, else the arithmetic and the splits that do.

    Args:
        layers_per_stage: layers of each of the pp stages, first to last; None asks for an equal split.
    """
    total = layers(component)
    if isinstance(component, Mlp | Other):
        if pp * vpp == 1:
            return None
        kind = "an MLP" if isinstance(component, Mlp) else "a network given by its figures"
        return f"{kind} is not cut into stages, found pp {pp} x vpp {vpp}; pp and vpp can be 1"
    if layers_per_stage is None:
        return _equal_split(total, pp, vpp)
    stages = tuple(layers_per_stage)
    if len(stages) != pp:
        return f"layers_per_stage has {len(stages)} counts, but pp is {pp}; give one count per stage"
    if sum(stages) != total:
        found = " + ".join(str(n) for n in stages)
        return f"layers_per_stage: {found} = {sum(stages)}, but there are {total} layers to share out"
    uneven = [n for n in stages if n % vpp]
    if uneven and not any(counted_ends(stages, vpp)):
        return f"layers_per_stage: {listed(uneven)} / vpp {vpp} is not whole; give multiples of {vpp}"
    return None


def counted_ends(stages: tuple[int, ...], vpp: int) -> tuple[bool, bool]:
    """Whether the embedding, and the loss, take the place of one layer of the first and of the last stage.

    They do where all stages have the same multiple of vpp parts once they are counted: 7+8+8+7 layers with vpp 8.

    Args:
        stages: layers of each stage, first to last.
    """
    most = max(stages)
    ends = (stages[0] == most - 1, stages[-1] == most - 1)
    counted = (stages[0] + ends[0], *stages[1:-1], stages[-1] + ends[1])
    return ends if vpp > 1 and len(stages) > 1 and set(counted) == {most} and most % vpp == 0 else (False, False)


def legal_ep(component: Component, ep: int) -> str | None:
    """None where ep shares out the routed experts evenly, else the arithmetic and every ep that does."""
    experts = component.experts if isinstance(component, Decoder) else None
    if experts is None:
        return None if ep == 1 else "there are no experts to share out; ep can be 1"
    if experts.count % ep == 0:
        return None
    shown = f"experts.count {experts.count} / ep {ep} = {experts.count / ep:.4g}"
    return f"{shown} is not whole; ep can be {listed(divisors(experts.count))}"


def legal_etp(component: Component, etp: int, most: int) -> str | None:
    """None where etp cuts each routed expert evenly, else the arithmetic and every etp up to `most` that does."""
    experts = component.experts if isinstance(component, Decoder) else None
    if experts is None:
        return "there are no experts to cut; leave it out"
    if experts.ffn % etp == 0:
        return None
    shown = f"experts.ffn {experts.ffn} / etp {etp} = {experts.ffn / etp:.4g}"
    return f"{shown} is not whole; etp can be {listed([n for n in divisors(experts.ffn) if n <= most])}"


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


def _cut_widths(component: Component, experts_apart: bool) -> dict[str, int]:
    """What tp must divide, by name. Vocabularies are padded instead, kv heads replicated."""
    if isinstance(component, Other):
        return {"a network given by its figures": 1}
    if isinstance(component, Mlp):
        if component.inner_norms:
            return {"an MLP with inner_norms": 1}
        cuts = [m.width_out if m.cut == "out" else m.width_in for m in mlp_matrices(component)]
        return {f"width {cut}": cut for cut in cuts}
    widths = {f"heads {component.heads}": component.heads}
    if isinstance(component, Decoder) and component.mamba:
        widths |= {f"mamba.groups {component.mamba.groups}": component.mamba.groups}
    for layer in blocks(component):
        experts = layer.experts
        if experts and not experts_apart:
            widths |= {f"experts.ffn {experts.ffn}": experts.ffn}
        if layer.ffn:
            name = "experts.shared_ffn" if experts else "ffn"
            widths |= {f"{name} {layer.ffn}": layer.ffn}
    return widths


def _tp_faults(component: Component, widths: Mapping[str, int], tp: int) -> list[str]:
    faults = [
        f"{name} / tp {tp} = {width / tp:.4g} is not whole" if width > 1 else f"{name} is not cut, found tp {tp}"
        for name, width in widths.items()
        if width % tp
    ]
    kv = getattr(component, "kv_heads", None) or tp
    if kv % tp and tp % kv:
        faults.append(f"kv_heads {kv} and tp {tp}: neither divides the other")
    return faults
