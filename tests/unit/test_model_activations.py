"""Bytes kept for the backward pass: against published figures and formulas. Against torch: tests/real."""

from __future__ import annotations

import pytest

from dslaunch.model.activations import Pass, layer_bytes, logits_bytes, working_set_bytes
from dslaunch.schema.model import Decoder, Mlp, ViT

GIB = 2**30
LLAMA70B = Decoder(arch="decoder", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
GPT = Decoder(
    arch="decoder",
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    ffn=4 * 12288,
    vocab=51200,
    gated_mlp=False,
    norm="layernorm",
)
S, H = 2048, 12288
STATISTICS = 4 * S * 96
"""Softmax statistics of GPT's 96 heads, fp32."""


def test_six_llama_layers_take_the_published_memory() -> None:
    """6.284 GiB is published for the activations of 6 Llama-70B layers, 4096 tokens, one rank, bf16."""
    counted = 6 * layer_bytes(LLAMA70B, Pass(4096, 1, False, "none"))
    assert counted / GIB == pytest.approx(6.284, rel=1e-3)


def test_classic_layer_is_the_published_34sbh_less_the_dropout_masks() -> None:
    assert layer_bytes(GPT, Pass(S, 1, False, "none")) == (34 - 2) * S * H + STATISTICS


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_classic_layer(tp: int) -> None:
    """sbh (10 + 24/t) without sequence parallelism, 34 sbh / t with it; less 2 sbh of masks, kept whole."""
    assert layer_bytes(GPT, Pass(S, tp, False, "none")) == S * H * (10 - 2 + 24 / tp) + STATISTICS / tp
    assert layer_bytes(GPT, Pass(S, tp, True, "none")) == (S * H * (34 - 2) + STATISTICS) / tp


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_modern_layer_by_formula(sequence_parallel: bool) -> None:
    s, h, d, a, k, f, t = 4096, 8192, 128, 64, 8, 28672, 8
    outside = 4 * 2 * h / (t if sequence_parallel else 1)
    inside = (2 * d * (a + 2 * k) + 2 * a * d + 4 * a + 6 * f) / t
    assert layer_bytes(LLAMA70B, Pass(s, t, sequence_parallel, "none")) == s * (outside + inside)


def test_kv_heads_are_replicated_where_tp_is_larger() -> None:
    """At tp 16 a rank has half the queries of tp 8, and the same one kv head."""
    at8, at16 = (layer_bytes(LLAMA70B, Pass(1, tp, False, "none")) for tp in (8, 16))
    whole, kv_head = 4 * 2 * 8192, 2 * 2 * 128
    assert at16 - whole - kv_head == (at8 - whole - kv_head) / 2


def test_selective_recompute_saves_the_softmax_statistics_alone() -> None:
    kept = layer_bytes(GPT, Pass(S, 8, True, "none")) - layer_bytes(GPT, Pass(S, 8, True, "selective"))
    assert kept == STATISTICS / 8


def test_full_recompute_keeps_the_input_and_brings_the_rest_back() -> None:
    assert layer_bytes(GPT, Pass(S, 8, False, "full")) == 2 * S * H
    assert layer_bytes(GPT, Pass(S, 8, True, "full")) == 2 * S * H / 8
    both = layer_bytes(GPT, Pass(S, 8, True, "full")) + working_set_bytes(GPT, Pass(S, 8, True))
    assert both == layer_bytes(GPT, Pass(S, 8, True, "none"))


def test_fp32_doubles_all_but_the_statistics() -> None:
    bf16, fp32 = (layer_bytes(GPT, Pass(S, 1, False, "none", width)) for width in (2, 4))
    assert fp32 - STATISTICS == 2 * (bf16 - STATISTICS)


def test_layer_scale_keeps_the_outputs_of_both_branches() -> None:
    plain = ViT(arch="vit", layers=2, hidden=64, heads=4, ffn=128, patch=2, image=8)
    scaled = plain.model_copy(update={"layer_scale": True})
    difference = layer_bytes(scaled, Pass(16, 2, False, "none")) - layer_bytes(plain, Pass(16, 2, False, "none"))
    assert difference == 2 * 2 * 16 * 64


def test_projector_keeps_the_inputs_of_its_layers_and_gelus() -> None:
    mlp = Mlp(arch="mlp", dims=(10, 8, 4, 6))
    assert layer_bytes(mlp, Pass(3, 1, False, "none")) == 3 * 2 * ((10 + 8) + (8 + 4) + 4)
    assert layer_bytes(mlp, Pass(3, 2, False, "none")) == 3 * 2 * ((10 + 4) + (4 + 4) + 2)
    assert layer_bytes(mlp, Pass(3, 1, False, "full")) == 3 * 2 * 10
    normed = mlp.model_copy(update={"norm": True})
    assert layer_bytes(normed, Pass(3, 2, True, "none")) == 3 * 2 * (5 + (5 + 4) + (4 + 2) + 2)


def test_logits_by_the_published_formula() -> None:
    """4sbh/t (1 + V/h), arXiv:2205.05198."""
    assert logits_bytes(GPT, Pass(S, 8, True)) == pytest.approx(4 * S * H / 8 * (1 + 51200 / H))
    assert logits_bytes(Mlp(arch="mlp", dims=(2, 2)), Pass(S, 1, False)) == 0
