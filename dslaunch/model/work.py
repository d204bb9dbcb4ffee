"""What a rank computes for one micro-batch: matrix products, attention cores, bytes that other kernels move.

Traffic of kernels that compute little, in elements per token (h hidden, f a rank's inner width):

    each branch's norm, and the addition of its output         5 h forward, 7 h backward
    rotary positions                                           2 (q + k) forward, the same backward
    norms of query and key heads                               2 (q + k) forward, 3 (q + k) backward
    SwiGLU, GeGLU                                              3 f forward, 5 f backward
    GELU                                                       2 f forward, 3 f backward
    routed experts: tokens sorted, weighted and summed         4 topk h + activation, as much backward
    fp8: each product's input, and its output's gradient       1 element of the input, 1 of the gradient
        of routed experts, cast by kernels of their own        2 each, 3 where the largest value is sought first
    adapters: each product's input and output                  2 elements, as many backward
    unfused attention, of heads * queries * keys               4 forward, 6 backward (softmax, dropout)
    a state space's scan                                       see `model.state_space`
    logits in fp32 by single operations, of the vocabulary     15 forward, 8 backward
    the same compiled, and fused                               7 and 4, 3 and 2

A family that fuses less moves a multiple of this (`hardware.efficiency.FamilyRates.passes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from dslaunch.hardware.kernels import Gemm
from dslaunch.hardware.software import Software
from dslaunch.model import state_space
from dslaunch.model.blocks import Attention, Block, blocks, divided, further_blocks
from dslaunch.model.matrices import (
    Matrix,
    head_matrices,
    layer_matrices,
    mlp_matrices,
    mtp_matrices,
    stem_matrices,
)
from dslaunch.model.passes import Pass
from dslaunch.schema.components import Component, Decoder, Mlp, Other
from dslaunch.schema.layer import Lora, Mamba

_LATENT_KERNELS = 12
"""Of latent attention beside its products: norms of the latents, heads taken apart, turned and joined again
(megatron/core/transformer/multi_latent_attention.py, 0.16)."""
_ROUTED_CASTS = {"tensorwise": 3.0, "rowwise": 3.0, "blockwise": 2.0, "mxfp8": 2.0, "nvfp4": 2.0}
"""Of experts' inputs (transformer_engine/pytorch/module/grouped_linear.py, 2.11)."""
_LOGITS = {"plain": (15.0, 8.0), "chunked": (15.0, 8.0), "compiled": (7.0, 4.0), "fused": (3.0, 2.0)}
_ADAPTER_KERNELS = 5
"""Dropout, two products, scaling, addition."""


@dataclass(frozen=True)
class Product:
    """A matrix product forward; backward there are two of as many FLOPs."""

    gemm: Gemm
    narrow: bool
    """Runs in fp8 where the model's products do."""
    target: str = ""
    """What it computes: qkv, o, up (gate and up), down, experts, ..."""
    routed: bool = False
    """Of routed experts."""

    def backward(self) -> tuple[Gemm, Gemm]:
        """For the input's gradient and for the weight's."""
        m, n, k, count = self.gemm.m, self.gemm.n, self.gemm.k, self.gemm.count
        return Gemm(m, k, n, count), Gemm(k, n, m, count)


@dataclass(frozen=True)
class Core:
    """The core of one attention, forward, on one rank."""

    flops: float
    """Counting only keys that are seen."""
    head: int
    keys: int
    unfused: tuple[Gemm, ...]
    """The two batched products where it is not fused: of all keys."""


@dataclass(frozen=True)
class Work:
    """What one micro-batch does in a layer, a stem or a tail."""

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    elements: tuple[float, float] = (0.0, 0.0)
    """Read and written by kernels that compute little: forward, backward."""
    squares: tuple[float, float] = (0.0, 0.0)
    """The same of unfused attention."""
    kernels: tuple[int, int] = (0, 0)
    """Launched forward, backward."""
    flops: float = 0.0
    """Forward FLOPs of a network that is given by its figures."""
    scans: tuple[Core, ...] = ()
    """Scans of state spaces, as attention within chunks."""


@dataclass(frozen=True)
class Batch:
    """What runs through a part: the pass, how many samples of it at once, and how the sequence is cut."""

    run: Pass
    samples: int
    cp: int = 1

    @property
    def rows(self) -> int:
        return self.run.tokens * self.samples


@lru_cache(maxsize=8192)
def layer_work(component: Component, batch: Batch, layer: int) -> Work:
    """Of one layer; the whole of a component without layers."""
    if isinstance(component, Other):
        return Work(flops=component.gflops * 1e9 * batch.samples, kernels=(100, 200))
    if isinstance(component, Mlp):
        parts = mlp_matrices(component)
        wide = sum(m.on_rank(batch.run.tp)[1] for m in parts) * batch.rows
        return Work(
            _products(parts, batch, 0), (), (2.0 * wide, 3.0 * wide), kernels=(3 * len(parts), 6 * len(parts))
        )
    found = block_work(blocks(component)[layer], batch, batch.run.reads.cross_at(layer))
    return _adapted(found, component.lora) if component.lora else found


def _adapted(work: Work, lora: Lora) -> Work:
    """With adapters beside products: inputs are read again, outputs added to, by kernels of their own."""
    targets = {_GROUP.get(target, target) for target in lora.targets}
    chosen = [p for p in work.products if p.target in targets]
    more = sum(2.0 * p.gemm.count * p.gemm.m * (p.gemm.k + p.gemm.n) for p in chosen)
    started = _ADAPTER_KERNELS * len(chosen)
    return replace(
        work,
        elements=(work.elements[0] + more, work.elements[1] + more),
        kernels=(work.kernels[0] + started, work.kernels[1] + 2 * started),
    )


@lru_cache(maxsize=8192)
def block_work(block: Block, batch: Batch, crossed: int) -> Work:
    """Of one transformer layer; `crossed` tokens are read by its cross-attention."""
    run = batch.run
    cores = tuple(_core(a, batch, crossed if a.cross else 0) for a in block.attentions)
    squares = sum(_squares(a, batch, crossed if a.cross else 0) for a in block.attentions)
    unfused = 0.0 if run.software.flash_attention else squares
    products = _products(layer_matrices(block), batch, crossed)
    forward, backward = _elements(block, batch)
    cast = sum(_cast(p, run.software) for p in products) if run.software.fp8 != "none" else 0.0
    branches = block.branches
    launched = 6 * branches + len(products) * (2 if run.software.fp8 != "none" else 1)
    launched += (0 if run.software.flash_attention else 3 * len(block.attentions)) + _of_experts(block, run)
    launched += state_space.kernels() if block.mamba else 0
    launched += _LATENT_KERNELS * sum(attention.mla is not None for attention in block.attentions)
    return Work(
        products,
        cores,
        (forward + cast, backward + cast),
        (4 * unfused, 6 * unfused),
        (launched, 2 * launched),
        scans=(_scan(block.mamba, batch),) if block.mamba else (),
    )


def _of_experts(block: Block, run: Pass) -> int:
    """Kernels that choose experts, sort tokens and put them together again; in fp8 their inputs are cast apart.

    Where counts of tokens are exchanged first, the host waits for them: as long as starting the difference takes.
    Where the exchange runs beside another micro-batch's computation, the host waits beside that too.
    """
    if block.experts is None:
        return 0
    software = run.software
    waits = software.dispatcher == "alltoall" and not (software.known_counts or software.overlap_ep)
    return (45 if waits else 14) + (6 if run.software.fp8 != "none" else 0)


@lru_cache(maxsize=4096)
def stem_work(component: Component, batch: Batch) -> Work:
    """Before the first layer: a tower's patch embedding, or the look-up of the tokens' rows."""
    hidden = 0 if isinstance(component, Mlp | Other) else component.hidden
    rows = batch.rows * hidden * batch.run.whole
    return Work(_products(stem_matrices(component), batch, 0), (), (3 * rows, 3 * rows), kernels=(4, 4))


@lru_cache(maxsize=4096)
def tail_work(component: Component, batch: Batch) -> Work:
    """After the last layer: norm, logits and loss, and the layers that predict further tokens."""
    run = batch.run
    head = _products(head_matrices(component, run.tp), batch, 0, narrow=False)
    if not isinstance(component, Decoder):
        return Work(head, kernels=(4, 8))
    logits = batch.rows * divided(head_matrices(component, run.tp)[0].width_out, run.tp)
    forward, backward = _LOGITS[run.software.loss]
    once = Work(head, (), (forward * logits, backward * logits), kernels=(20, 20))
    if component.mtp_layers == 0:
        return once
    joined = Work(_products(mtp_matrices(component)[:1], batch, 0))
    further = [joined, *(block_work(block, batch, 0) for block in further_blocks(component)), once]
    return _sum([once, *further * component.mtp_layers])


def _sum(parts: list[Work]) -> Work:
    return Work(
        tuple(chain.from_iterable(p.products for p in parts)),
        tuple(chain.from_iterable(p.cores for p in parts)),
        (sum(p.elements[0] for p in parts), sum(p.elements[1] for p in parts)),
        (sum(p.squares[0] for p in parts), sum(p.squares[1] for p in parts)),
        (sum(p.kernels[0] for p in parts), sum(p.kernels[1] for p in parts)),
        scans=tuple(chain.from_iterable(p.scans for p in parts)),
    )


def _products(
    parts: tuple[Matrix, ...], batch: Batch, crossed: int, narrow: bool = True
) -> tuple[Product, ...]:
    """A rank's products; query, key and value of one input are one product, as are gate and up."""
    joined: dict[tuple[str, int, str], Product] = {}
    for matrix in parts:
        product = _product(matrix, batch, crossed, narrow)
        key = (_GROUP.get(matrix.target, matrix.target), product.gemm.k, matrix.cut + matrix.runs)
        seen = joined.get(key)
        gemm = product.gemm
        if seen and matrix.cut == "out":
            gemm = replace(gemm, n=gemm.n + seen.gemm.n)
        elif seen:
            key = (matrix.target, product.gemm.k, f"{len(joined)}")
        joined[key] = Product(gemm, product.narrow, _GROUP.get(matrix.target, matrix.target), product.routed)
    return tuple(joined.values())


_GROUP = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}


def _product(matrix: Matrix, batch: Batch, crossed: int, narrow: bool) -> Product:
    run = batch.run
    width_in, width_out = matrix.on_rank(run.etp if matrix.routed else run.tp)
    if matrix.routed:
        local = max(1, matrix.copies // run.ep)
        rows = max(1, round(batch.rows * run.etp / run.tp * matrix.active / local))
        return Product(Gemm(rows, width_out, width_in, local), narrow, routed=True)
    rows = {"own": batch.rows, "context": crossed * batch.samples, "sample": batch.samples}[matrix.runs]
    return Product(
        Gemm(max(1, rows), width_out, width_in, matrix.active), narrow and matrix.target != "router"
    )


def _cast(product: Product, software: Software) -> float:
    """Elements of a product's input that is written twice in half the width; what made it reads it.

    Experts' inputs are read by kernels of their own, unless their products are one with what stands between.
    """
    if not product.narrow:
        return 0.0
    apart = product.routed and not software.fused_experts
    return (
        (_ROUTED_CASTS[software.fp8] if apart else 1.0) * product.gemm.count * product.gemm.m * product.gemm.k
    )


def _keys(attention: Attention, batch: Batch, crossed: int) -> int:
    """Keys that a query could see, of all ranks of its sequence."""
    if attention.cross:
        return crossed
    own = batch.run.tokens * batch.cp
    return min(own, attention.window or own) + batch.run.reads.shared


def _core(attention: Attention, batch: Batch, crossed: int) -> Core:
    run, keys = batch.run, _keys(attention, batch, crossed)
    heads, width = divided(attention.heads, run.tp), attention.head_dim + attention.value_dim
    seen = keys / 2 if attention.causal and keys == run.tokens * batch.cp else float(keys)
    flops = 2.0 * batch.rows * seen * heads * width
    both = (
        Gemm(run.tokens, keys, attention.head_dim, batch.samples * heads),
        Gemm(run.tokens, attention.value_dim, keys, batch.samples * heads),
    )
    return Core(flops, max(attention.head_dim, attention.value_dim), keys, both)


def _scan(mamba: Mamba, batch: Batch) -> Core:
    """Triton's kernels, which work on a chunk's tokens as attention does on those of a short sequence."""
    flops = float(batch.rows) * state_space.scan_flops(mamba) / batch.run.tp
    return Core(flops, mamba.head_dim, mamba.chunk, ())


def _squares(attention: Attention, batch: Batch, crossed: int) -> float:
    return float(batch.rows) * _keys(attention, batch, crossed) * divided(attention.heads, batch.run.tp)


def _elements(block: Block, batch: Batch) -> tuple[float, float]:
    """(forward, backward) elements that norms, additions, positions and activations read and write."""
    run = batch.run
    branches = block.branches
    norms = max(block.norms, branches)
    whole = block.hidden * run.whole
    forward, backward = whole * (3.0 * branches + 2.0 * norms), whole * (4.0 * branches + 3.0 * norms)
    for attention in block.attentions:
        turned = attention.query_width(run.tp) + attention.kv_width(run.tp) / 2
        forward += turned * (2 + 2 * bool(attention.qk_norm))
        backward += turned * (2 + 3 * bool(attention.qk_norm))
    if block.mamba:
        scan = state_space.elements(block.mamba, run.tp, run.width)
        forward, backward = forward + scan[0], backward + scan[1]
    inner, outer = (3.0, 5.0) if block.gated else (2.0, 3.0)
    width = float(divided(block.ffn, run.tp))
    if block.experts:
        routed = block.experts.top_k * run.etp / run.tp
        width += routed * divided(block.experts.ffn, run.etp)
        forward += 4 * routed * block.expert_width
        backward += 4 * routed * block.expert_width
    return batch.rows * (forward + inner * width), batch.rows * (backward + outer * width)
