"""Forward FLOPs: against the published formula, and by hand."""

from __future__ import annotations

import pytest

from dslaunch.model.flops import attention_core_flops, flops, layer_flops
from dslaunch.schema.model import Decoder, Mlp, ViT


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
