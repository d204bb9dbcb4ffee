"""Parameter counts: by hand, and sums over the ranks of a grid. Against real classes: tests/real."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dslaunch.model.params import params, params_on_rank, trainable
from dslaunch.model.shapes import layers
from dslaunch.schema.model import Decoder, Mlp, ViT

LLAMA70B = Decoder(
    arch="decoder", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, max_positions=8192
)
GPT = Decoder(
    arch="decoder",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=8,
    ffn=256,
    vocab=1001,
    tied_embeddings=True,
    gated_mlp=False,
    norm="layernorm",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    position="learned",
    max_positions=128,
)
SIGLIP = ViT(
    arch="vit", layers=27, hidden=1152, heads=16, ffn=4304, patch=14, image=224, attention_pooling=True
)
DINO = ViT(
    arch="vit",
    layers=24,
    hidden=1024,
    heads=16,
    ffn=4096,
    patch=14,
    image=224,
    class_token=True,
    registers=4,
    layer_scale=True,
)
PROJECTOR = Mlp(arch="mlp", dims=(2176, 8704, 4096, 4096), norm=True)
EVERY = [LLAMA70B, GPT, SIGLIP, DINO, PROJECTOR]


def test_gpt_by_hand() -> None:
    layer = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 2 * 2 * 64
    assert params(GPT) == (1001 + 128) * 64 + 4 * layer + 2 * 64


def test_openvla_towers_by_hand() -> None:
    siglip_layer = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    pooling = siglip_layer - 2 * 1152 + 1152
    patches = 3 * 14 * 14 * 1152 + 1152 + 256 * 1152
    assert params(SIGLIP) == patches + 27 * siglip_layer + 2 * 1152 + pooling == 427_680_704
    dino_layer = 12 * 1024**2 + 15 * 1024
    tokens = 3 * 14 * 14 * 1024 + 1024 + (256 + 1 + 4) * 1024
    assert params(DINO) == tokens + 24 * dino_layer + 2 * 1024 == 303_230_976


def test_projector_by_hand() -> None:
    expected = 2176 * 8704 + 8704 + 8704 * 4096 + 4096 + 4096 * 4096 + 4096 + 2 * 2176
    assert params(PROJECTOR) == expected


def test_frozen_component_trains_nothing() -> None:
    assert trainable(SIGLIP) == params(SIGLIP)
    assert trainable(SIGLIP.model_copy(update={"train": "nothing"})) == 0


@pytest.mark.parametrize("component", [LLAMA70B, SIGLIP, DINO], ids=["llama", "siglip", "dino"])
def test_stages_add_up_to_the_whole(component: Decoder | ViT) -> None:
    total = layers(component)
    cuts = [0, 1, total // 2, total]
    stages = [params_on_rank(component, 1, a, b - a) for a, b in pairwise(cuts)]
    assert sum(stages) == params(component)


def test_tied_table_stands_on_first_and_last_stage() -> None:
    stages = [params_on_rank(GPT, 1, 0, 2), params_on_rank(GPT, 1, 2, 2)]
    assert sum(stages) == params(GPT) + 1001 * 64


@pytest.mark.parametrize("component", EVERY, ids=["llama", "gpt", "siglip", "dino", "projector"])
def test_tensor_parallel_ranks_are_the_whole_and_replicas(component: Decoder | ViT | Mlp) -> None:
    """tp * rank - whole = (tp - 1) * what is replicated, whatever tp is; a padded vocabulary adds to it."""
    replicas = []
    for tp in (2, 4, 8):
        on_all = tp * params_on_rank(component, tp, 0, layers(component))
        padding = (-(-1001 // tp) * tp - 1001) * 64 if component is GPT else 0
        replicas.append((on_all - padding - params(component)) / (tp - 1))
    assert replicas[0] == replicas[1] == replicas[2]


def test_what_is_replicated() -> None:
    norms = (2 * 80 + 1) * 8192
    assert 8 * params_on_rank(LLAMA70B, 8, 0, 80) == params(LLAMA70B) + 7 * norms
    row_bias_and_norms = 4 * (64 + 64 + 4 * 64) + 2 * 64 + 128 * 64
    padding = 64
    assert 2 * params_on_rank(GPT, 2, 0, 4) == params(GPT) + row_bias_and_norms + padding


def test_kv_heads_are_replicated_where_tp_is_larger() -> None:
    one_kv_head = 2 * 8192 * 128
    layer8 = params_on_rank(LLAMA70B, 8, 40, 1)
    layer16 = params_on_rank(LLAMA70B, 16, 40, 1)
    cut = layer8 - one_kv_head - 2 * 8192
    assert layer16 == cut / 2 + one_kv_head + 2 * 8192


def test_odd_last_layer_of_an_mlp_is_cut_too() -> None:
    mlp = Mlp(arch="mlp", dims=(10, 8, 4, 6))
    assert params_on_rank(mlp, 2, 0, 1) == (10 * 8 + 8) // 2 + (8 * 4 // 2 + 4) + (4 * 6 // 2 + 6)
