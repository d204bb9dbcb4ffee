"""Forward FLOPs: against the published formula, and by hand."""

from __future__ import annotations

import pytest

from dslaunch.model.flops import attention_core_flops, flops, layer_flops
from dslaunch.model.tokens import Reads
from dslaunch.schema.layer import CrossAttention, Modulation, Window
from dslaunch.schema.model import Decoder, Mlp, Other, Transformer, ViT


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> Decoder:
    return Decoder(
        arch="decoder",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        gated_mlp=False,
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocab", "tokens"),
    [(24, 2304, 24, 51200, 2048), (96, 12288, 96, 51200, 2048), (80, 10240, 80, 51200, 8192)],
)
def test_step_equals_the_published_formula(
    layers: int, hidden: int, heads: int, vocab: int, tokens: int
) -> None:
    """72 B s L h^2 (1 + s/(6h) + V/(12hL)), arXiv:2104.04473: forward and backward, no recompute."""
    counted = 3 * flops(gpt(layers, hidden, heads, vocab), tokens, causal=False).total
    bracket = 1 + tokens / (6 * hidden) + vocab / (12 * hidden * layers)
    assert counted == pytest.approx(72 * tokens * layers * hidden**2 * bracket, rel=1e-12)


def test_causal_mask_halves_the_core_of_a_decoder_only() -> None:
    decoder = gpt(2, 64, 4, 100)
    assert attention_core_flops(decoder, 32, causal=False) == 2 * attention_core_flops(decoder, 32)
    tower = ViT(arch="vit", layers=2, hidden=64, heads=4, ffn=128, patch=2, image=8)
    assert attention_core_flops(tower, 16) == attention_core_flops(tower, 16, causal=False) == 4 * 16**2 * 64


def test_grouped_queries_and_gated_mlp_by_hand() -> None:
    decoder = Decoder(arch="decoder", layers=1, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    matrices = 8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert layer_flops(decoder, 4096) == 2 * 4096 * matrices + 2 * 4096**2 * 8192
    assert flops(decoder, 4096).tail == 2 * 4096 * 8192 * 128256


def test_tower_embeds_patches_and_has_no_logits() -> None:
    tower = ViT(
        arch="vit", layers=3, hidden=64, heads=4, ffn=128, patch=2, image=8, channels=1, class_token=True
    )
    counted = flops(tower, tower.tokens)
    assert (counted.stem, counted.tail) == (2 * 16 * 1 * 4 * 64, 0)
    assert counted.total == counted.stem + 3 * counted.layers[0]


def test_projector_by_hand() -> None:
    counted = flops(Mlp(arch="mlp", dims=(10, 20, 30)), 7)
    assert counted.total == counted.layers[0] == 2 * 7 * (10 * 20 + 20 * 30)


@pytest.mark.parametrize("window", [1, 5, 12, 13, 40])
def test_a_window_counts_the_keys_that_a_query_sees(window: int) -> None:
    """Under a causal mask query i sees min(i, window) keys; half a key each is left to the diagonal."""
    plain = gpt(2, 64, 4, 100)
    windowed = plain.model_copy(update={"window": Window(tokens=window, full_every=2)})
    tokens = 12
    pairs = sum(min(i + 0.5, window) if window < tokens else i + 0.5 for i in range(tokens))
    counted = attention_core_flops(windowed, tokens) / (4 * 64)
    assert counted == pytest.approx(pairs, abs=0.5)
    assert attention_core_flops(windowed, tokens, layer=1) == attention_core_flops(plain, tokens)


def test_windows_of_a_tower_see_their_own_patches() -> None:
    tower = ViT(
        arch="vit", layers=2, hidden=64, heads=4, ffn=128, patch=2, image=16, window=Window(tokens=16)
    )
    assert attention_core_flops(tower, 64) == 4 * 64 * 16 * 64


EXPERT = Transformer(arch="transformer", layers=4, hidden=64, heads=4, kv_heads=2, ffn=0)


def test_an_expert_that_shares_attention_also_reads_the_other_ends_keys() -> None:
    alone, shared = (attention_core_flops(EXPERT, 10, reads=Reads(shared=n)) for n in (0, 90))
    assert alone == 4 * 10 * 10 * 64
    assert shared == 4 * 10 * (10 + 90) * 64


def test_cross_attention_projects_and_reads_the_tokens_of_its_layer() -> None:
    crossed = EXPERT.model_copy(update={"cross": CrossAttention(width=32, first=1, every=2, instead=True)})
    reads = Reads(cross=(0, 90, 0, 90))
    own = 2 * 10 * (64 * 64 * 2) + 2 * 10 * 64 * 2 * 32
    assert layer_flops(crossed, 10, layer=0, reads=reads) == own + 4 * 10 * 10 * 64
    projected = 2 * 10 * (64 * 64 * 2) + 2 * 90 * 32 * 2 * 32
    assert layer_flops(crossed, 10, layer=1, reads=reads) == projected + 4 * 10 * 90 * 64


def test_adaptive_norms_run_once_a_sample() -> None:
    adaptive = EXPERT.model_copy(update={"modulation": Modulation(width=16, factors=6, final_factors=2)})
    more = flops(adaptive, 10).total - flops(EXPERT, 10).total
    assert more == 2 * 16 * 64 * (4 * 6 + 2)


def test_merged_tokens_gated_layers_and_sets_of_weights() -> None:
    merger = Mlp(arch="mlp", dims=(64, 32, 8), merge=4, gated=True, categories=32)
    assert flops(merger, 7).total == 2 * 7 * (2 * 64 * 32 + 32 * 8)
    davit = Other(arch="other", params=10, hidden=4, tokens=2, gflops=1.5, activation_mib=1.0)
    assert flops(davit, 2).total == 1_500_000_000
