"""Bytes kept for the backward pass, against what torch's autograd really saves for a layer on the CPU."""

from __future__ import annotations

import pytest

from dslaunch.model.activations import Pass, layer_bytes
from dslaunch.schema.model import Mlp, ViT
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


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct tensors that autograd keeps, parameters aside."""
    own = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = module(x)
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
