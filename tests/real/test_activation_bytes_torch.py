"""Bytes kept for the backward pass, against what torch's autograd really saves for a layer on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dslaunch.model.activations import layer_bytes
from dslaunch.model.passes import Pass
from dslaunch.model.tokens import Reads
from dslaunch.schema.layer import CrossAttention, Experts
from dslaunch.schema.model import Decoder, Mlp, Transformer, ViT
from tests.real.parts import need

need("torch")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

TOWER = ViT(arch="vit", layers=1, hidden=256, heads=8, ffn=640, patch=2, image=16)
TOKENS = TOWER.tokens


class Layer(nn.Module):
    """A transformer layer in plain torch, with separate projections and the fused attention of torch."""

    def __init__(self, tower: ViT, recompute: str) -> None:
        super().__init__()
        hidden, ffn = tower.hidden, tower.ffn
        self.heads, self.recompute = tower.heads, recompute
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        scales = 2 if tower.layer_scale else 0
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(scales))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).view(1, -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        core = functional.scaled_dot_product_attention
        again = self.recompute == "selective"
        attended = checkpoint(core, q, k, v, use_reentrant=True) if again else core(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(x.shape))

    def layer(self, x: Tensor) -> Tensor:
        first, second = list(self.scales) or (None, None)
        attended = self.attention(self.norms[0](x))
        x = x + (attended if first is None else attended * first)
        inner = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + (inner if second is None else inner * second)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=True) if self.recompute == "full" else self.layer(x)


def saved_bytes(run: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module | None = None) -> int:
    """Bytes of the distinct float tensors that autograd keeps, parameters of `module` (or `run`) aside."""
    owner = module or run
    assert isinstance(owner, nn.Module)
    own = {parameter.data_ptr() for parameter in owner.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run(x)
    assert result.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layer_scale", [False, True], ids=["plain", "layer_scale"])
def test_layer_keeps_what_the_ledger_says(dtype: torch.dtype, recompute: str, layer_scale: bool) -> None:
    tower = TOWER.model_copy(update={"layer_scale": layer_scale})
    module = Layer(tower, recompute).to(dtype)
    x = torch.randn(1, TOKENS, tower.hidden, dtype=dtype, requires_grad=True)
    counted = layer_bytes(tower, Pass(TOKENS, 1, False, recompute, dtype.itemsize))
    norm_statistics = 0 if recompute == "full" else 2 * 2 * dtype.itemsize * TOKENS
    assert saved_bytes(module, x) == counted + norm_statistics


def test_projector_keeps_what_the_ledger_says() -> None:
    mlp = Mlp(arch="mlp", dims=(96, 256, 128, 64), norm=True)
    a, b, c, d = mlp.dims
    module = nn.Sequential(
        nn.LayerNorm(a), nn.Linear(a, b), nn.GELU(), nn.Linear(b, c), nn.GELU(), nn.Linear(c, d)
    )
    x = torch.randn(TOKENS, a, requires_grad=True)
    norm_statistics = 2 * 4 * TOKENS
    assert saved_bytes(module, x) == layer_bytes(mlp, Pass(TOKENS, width=4)) + norm_statistics


class Cross(nn.Module):
    """Pre-norm attention of `hidden` wide tokens over others of another width."""

    def __init__(self, hidden: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(hidden)
        self.q, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k, self.v = nn.Linear(width, hidden), nn.Linear(width, hidden)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        pairs = ((self.q, self.norm(x)), (self.k, read), (self.v, read))
        q, k, v = (
            linear(y).view(1, -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2) for linear, y in pairs
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


def test_cross_attention_keeps_what_the_ledger_says() -> None:
    """The tokens that are read are another component's output, kept once for all layers: not in this ledger."""
    dit = Transformer(
        arch="transformer", layers=1, hidden=128, heads=4, ffn=0, cross=CrossAttention(width=96, instead=True)
    )
    module = Cross(dit.hidden, 96, dit.heads)
    x, read = torch.randn(1, 24, 128, requires_grad=True), torch.randn(1, 56, 96, requires_grad=True)
    counted = layer_bytes(dit, Pass(24, width=4, reads=Reads(cross=(56,))))
    norm_statistics = 2 * 4 * 24
    assert saved_bytes(lambda y: module(y, read), x, module) == counted + norm_statistics + 4 * read.numel()


class Routed(nn.Module):
    """Experts with GELU, each over the tokens that a router sends to it."""

    def __init__(self, hidden: int, ffn: int, count: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(hidden, count, bias=False)
        self.ups = nn.ModuleList(nn.Linear(hidden, ffn, bias=False) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(ffn, hidden, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        made, order = [], []
        for expert, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            made.append(down(functional.gelu(up(x[rows]))) * weights[rows, slots, None])
            order.append(rows * self.top_k + slots)
        back = torch.cat(order).argsort()
        return torch.cat(made)[back].view(len(x), self.top_k, -1).sum(1)


def test_experts_keep_what_the_ledger_says() -> None:
    """Apart from the indices, and a weight for each token and expert that it goes to."""
    moe = Decoder(
        arch="decoder", layers=1, hidden=64, heads=4, kv_heads=4, ffn=8, vocab=8, gated_mlp=False,
        experts=Experts(count=8, top_k=2, ffn=96),
    )  # fmt: skip
    module, x = Routed(64, 96, 8, 2), torch.randn(TOKENS, 64, requires_grad=True)
    no_experts = moe.model_copy(update={"experts": None, "ffn": 8})
    mlp_inner = 2 * 8 * 4 * TOKENS
    experts_alone = layer_bytes(moe, Pass(TOKENS, width=4)) - layer_bytes(no_experts, Pass(TOKENS, width=4))
    weights, own_input = 4 * 2 * TOKENS, 4 * x.numel()
    assert saved_bytes(module, x) == experts_alone + mlp_inner + weights + own_input
