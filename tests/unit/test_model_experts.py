"""Mixtures of experts and latent attention: parameters, FLOPs and bytes by hand."""

from __future__ import annotations

import pytest

from dslaunch.model.activations import layer_bytes
from dslaunch.model.flops import flops, layer_flops
from dslaunch.model.fused import IMBALANCE
from dslaunch.model.params import active, counts, params, params_on_rank
from dslaunch.model.passes import Pass
from dslaunch.schema.layer import Experts, LatentAttention
from dslaunch.schema.model import Decoder

H, F, SHARED, COUNT, TOP = 64, 48, 96, 8, 2
MOE = Decoder(
    arch="decoder",
    layers=4,
    hidden=H,
    heads=8,
    kv_heads=2,
    ffn=256,
    vocab=100,
    experts=Experts(count=COUNT, top_k=TOP, ffn=F, shared_ffn=SHARED, shared_gate=True, dense_layers=1),
)
ATTENTION = H * (64 + 2 * 16) + 64 * H
ROUTED = 3 * 3 * H * F * COUNT
"""Of the three layers that have experts."""


def test_layers_with_experts_and_without() -> None:
    dense = ATTENTION + 3 * H * 256 + 2 * H
    mixed = ATTENTION + COUNT * 3 * H * F + 3 * H * SHARED + H * COUNT + H + 2 * H
    assert params(MOE) == 2 * 100 * H + dense + 3 * mixed + H
    assert counts(MOE, 1, 0, 4).experts == ROUTED
    assert active(MOE) == params(MOE) - ROUTED * (COUNT - TOP) // COUNT


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_expert_parallelism_shares_out_routed_experts_alone(ep: int) -> None:
    assert params_on_rank(MOE, 1, 0, 4, ep) == params(MOE) - ROUTED + ROUTED // ep


def test_the_router_is_on_every_rank() -> None:
    router, gate, norms = 3 * H * COUNT, 3 * H, (2 * 4 + 1) * H
    assert 2 * params_on_rank(MOE, 2, 0, 4, 1) == params(MOE) + router + gate + norms


def test_a_token_runs_through_its_top_experts_and_the_shared_ones() -> None:
    per_token = ATTENTION + TOP * 3 * H * F + 3 * H * SHARED + H * COUNT + H
    core = 2 * 16**2 * 64
    assert layer_flops(MOE, 16, layer=2) == 2 * 16 * per_token + core
    assert layer_flops(MOE, 16, layer=0) == 2 * 16 * (ATTENTION + 3 * H * 256) + core


def test_more_experts_cost_no_flops_but_the_routers() -> None:
    doubled = MOE.model_copy(update={"experts": MOE.experts.model_copy(update={"count": 16})})
    assert flops(doubled, 16).total - flops(MOE, 16).total == 3 * 2 * 16 * H * 8


def test_experts_keep_dispatched_tokens_and_inner_widths() -> None:
    dense = MOE.model_copy(update={"experts": None, "ffn": SHARED})
    routed = layer_bytes(MOE, Pass(16), 2) - layer_bytes(dense, Pass(16))
    router_logits = 4 * COUNT
    assert routed == 16 * (2 * TOP * (2 * H + 3 * F) + router_logits)
    fullest = layer_bytes(MOE, Pass(16, ep=4), 2) - layer_bytes(dense, Pass(16))
    assert fullest == pytest.approx(16 * (IMBALANCE * 2 * TOP * (2 * H + 3 * F) + router_logits))


def test_latent_attention_by_hand() -> None:
    mla = LatentAttention(
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )
    latent = Decoder(
        arch="decoder", layers=1, hidden=H, heads=8, kv_heads=8, ffn=F, vocab=10, mla=mla
    )
    queries, values = 8 * (8 + 4), 8 * 6
    down, up = H * 24 + H * (16 + 4), 24 * queries + 16 * 8 * (8 + 6)
    layer = down + up + values * H + 24 + 16 + 3 * H * F + 2 * H
    assert params(latent) == layer + 20 * H + H
    assert params_on_rank(latent, 8, 0, 1) == down + 24 + 16 + 3 * H + 2 * 2 * H + (
        up + values * H + 3 * H * F
    ) // 8
    core = 2 * 16**2 // 2 * 8 * ((8 + 4) + 6)
    assert layer_flops(latent, 16) == 2 * 16 * (down + up + values * H + 3 * H * F) + core
    direct = latent.model_copy(update={"mla": mla.model_copy(update={"q_lora_rank": 0})})
    assert params(latent) - params(direct) == H * 24 + 24 * queries + 24 - H * queries


def test_sinks_and_the_routers_bias_by_hand() -> None:
    assert MOE.experts is not None
    biased = MOE.experts.model_copy(update={"biased_router": True})
    oss = MOE.model_copy(update={"sinks": True, "experts": biased})
    assert params(oss) - params(MOE) == 4 * 8 + 3 * COUNT
    assert params_on_rank(oss, 2, 0, 4) - params_on_rank(MOE, 2, 0, 4) == 4 * 8 // 2 + 3 * COUNT


def test_a_layer_that_predicts_a_further_token() -> None:
    further = MOE.model_copy(update={"mtp_layers": 1})
    mixed = params_on_rank(MOE, 1, 1, 1)
    assert params(further) - params(MOE) == mixed + 2 * H * H + 3 * H
    logits = 2 * 16 * H * 100
    assert flops(further, 16).tail == 2 * logits + 2 * 16 * 2 * H * H + layer_flops(MOE, 16, layer=3)
