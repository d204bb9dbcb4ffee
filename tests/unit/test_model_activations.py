"""Bytes kept for the backward pass: against published figures and formulas. Against torch: tests/real."""

from __future__ import annotations

import pytest

from dslaunch.hardware.software import Software
from dslaunch.model.activations import layer_bytes, logits_bytes, working_set_bytes
from dslaunch.model.passes import Pass
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
MEGATRON = Software("megatron")
DROPOUT = Software("megatron", dropout=True)
CLASSIC = Software("megatron", dropout=True, flash_attention=False)


def run(tokens: int, tp: int = 1, sequence_parallel: bool = False, recompute: str = "none") -> Pass:
    """One pass under Megatron's layers."""
    return Pass(tokens, tp, sequence_parallel, recompute, software=MEGATRON)


def test_six_llama_layers_take_the_published_memory() -> None:
    """6.284 GiB is published for the activations of 6 Llama-70B layers, 4096 tokens, one rank, bf16."""
    counted = 6 * layer_bytes(LLAMA70B, run(4096, 1, False, "none"))
    assert counted / GIB == pytest.approx(6.284, rel=1e-3)


def test_classic_layer_is_the_published_one() -> None:
    """34 sbh + 5 a s^2 b, arXiv:2205.05198; a fused core has its statistics instead of the s^2 terms."""
    assert layer_bytes(GPT, Pass(S, software=CLASSIC)) == 34 * S * H + 5 * 96 * S * S
    assert layer_bytes(GPT, Pass(S, software=DROPOUT)) == 34 * S * H + STATISTICS
    assert layer_bytes(GPT, run(S)) == (34 - 2) * S * H + STATISTICS


def test_selective_recompute_leaves_34sbh() -> None:
    assert layer_bytes(GPT, Pass(S, 8, True, "selective", software=CLASSIC)) == 34 * S * H / 8


def test_several_samples_or_exchanged_heads_keep_the_cores_output_twice() -> None:
    once = layer_bytes(LLAMA70B, run(S))
    assert layer_bytes(LLAMA70B, Pass(S, software=MEGATRON, together=2)) - once == 2 * S * 8192
    exchanged = Software("megatron", alltoall_context=True)
    assert layer_bytes(LLAMA70B, Pass(S, software=exchanged, cp=2)) - once == 2 * S * 8192
    assert layer_bytes(LLAMA70B, Pass(S, software=MEGATRON, cp=2)) == once


def test_fp8_keeps_the_inputs_of_products_in_8_bits() -> None:
    """Outputs of two norms and of the activation lose half; the projection has a copy of the core's
    output."""
    fp8 = Software("megatron", fp8="tensorwise")
    saved = layer_bytes(LLAMA70B, run(S)) - layer_bytes(LLAMA70B, Pass(S, software=fp8))
    assert saved == S * (2 * 8192 + 28672 - 8192)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_classic_layer(tp: int) -> None:
    """sbh (10 + 24/t) without sequence parallelism, 34 sbh / t with it; less 2 sbh of masks, kept whole."""
    assert layer_bytes(GPT, run(S, tp, False, "none")) == S * H * (10 - 2 + 24 / tp) + STATISTICS / tp
    assert layer_bytes(GPT, run(S, tp, True, "none")) == (S * H * (34 - 2) + STATISTICS) / tp


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_modern_layer_by_formula(sequence_parallel: bool) -> None:
    s, h, d, a, k, f, t = 4096, 8192, 128, 64, 8, 28672, 8
    outside = 4 * 2 * h / (t if sequence_parallel else 1)
    inside = (2 * d * (a + 2 * k) + 2 * a * d + 4 * a + 6 * f) / t
    assert layer_bytes(LLAMA70B, run(s, t, sequence_parallel, "none")) == s * (outside + inside)


def test_kv_heads_are_replicated_where_tp_is_larger() -> None:
    """At tp 16 a rank has half the queries of tp 8, and the same one kv head."""
    at8, at16 = (layer_bytes(LLAMA70B, run(1, tp, False, "none")) for tp in (8, 16))
    whole, kv_head = 4 * 2 * 8192, 2 * 2 * 128
    assert at16 - whole - kv_head == (at8 - whole - kv_head) / 2


def test_selective_recompute_saves_the_softmax_statistics_alone() -> None:
    kept = layer_bytes(GPT, run(S, 8, True, "none")) - layer_bytes(GPT, run(S, 8, True, "selective"))
    assert kept == STATISTICS / 8


def test_full_recompute_keeps_the_input_and_brings_the_rest_back() -> None:
    assert layer_bytes(GPT, run(S, 8, False, "full")) == 2 * S * H
    assert layer_bytes(GPT, run(S, 8, True, "full")) == 2 * S * H / 8
    working = working_set_bytes(GPT, run(S, 8, True, "full")) - working_set_bytes(GPT, run(S, 8, True))
    assert layer_bytes(GPT, run(S, 8, True, "full")) + working == layer_bytes(GPT, run(S, 8, True))


def test_a_layers_backward_pass_takes_gradients_beside_what_is_kept() -> None:
    """The output's gradient, in a half and whole, and the activation's output's: 2 (h/t + h (1 + 1/t) + h +
    f/t)."""
    assert working_set_bytes(GPT, run(S, 8, True)) == 2 * S * (H / 8 + H * (1 + 1 / 8) + H + 4 * H / 8)


def test_fp32_doubles_all_but_the_statistics() -> None:
    bf16, fp32 = (layer_bytes(GPT, Pass(S, width=width, software=MEGATRON)) for width in (2, 4))
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
    """4 sbh (1 + V/h), arXiv:2205.05198, and the logits in bf16 that become the softmax in fp32."""
    tokens = 4 * S
    published = 4 * tokens * H * (1 + 51200 / H)
    assert logits_bytes(GPT, run(tokens)) == pytest.approx(published + 2 * tokens * 51200)
    assert logits_bytes(Mlp(arch="mlp", dims=(2, 2)), run(S)) == 0


def test_the_heads_product_counts_where_its_weight_is_larger_than_the_loss() -> None:
    """Gradients of logits, input and weight: 2 (sV + sh + Vh) bytes; so it is with a loss that is one
    kernel."""
    assert logits_bytes(GPT, run(64)) == 2 * (64 * 51200 + 64 * H + 51200 * H)
    fused = Software("megatron", loss="fused")
    assert logits_bytes(GPT, Pass(S, software=fused)) == 2 * (S * 51200 + S * H + 51200 * H)
