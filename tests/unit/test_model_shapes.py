"""What a user is told when a component can't be cut as asked."""

from __future__ import annotations

import pytest

from dslaunch.model.shapes import counted_ends, legal_ep, legal_etp, legal_pp, legal_tp
from dslaunch.schema.layer import Experts
from dslaunch.schema.model import Decoder, Mlp, Other, ViT


def decoder(heads: int, kv_heads: int, ffn: int, layers: int = 28) -> Decoder:
    return Decoder(
        arch="decoder", layers=layers, hidden=heads * 128, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=1000
    )


QWEN = decoder(heads=28, kv_heads=4, ffn=18944)
LLAMA70B = decoder(heads=64, kv_heads=8, ffn=28672, layers=80)
TOWER = ViT(arch="vit", layers=27, hidden=1152, heads=16, ffn=4304, patch=14, image=224)
PROJECTOR = Mlp(arch="mlp", dims=(1408, 8192, 8192))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 64])
def test_even_cuts_are_legal(tp: int) -> None:
    assert legal_tp(LLAMA70B, tp) is None
    assert legal_tp(PROJECTOR, tp) is None


def test_uneven_heads_name_every_tp_that_suits_all_constraints() -> None:
    assert legal_tp(QWEN, 8) == "heads 28 / tp 8 = 3.5 is not whole; tp can be 1, 2, 4"


def test_kv_heads_alone_can_refuse() -> None:
    told = legal_tp(decoder(heads=24, kv_heads=8, ffn=96), 12)
    assert told == "kv_heads 8 and tp 12: neither divides the other; tp can be 1, 2, 4, 8, 24"


def test_every_fault_is_named() -> None:
    assert legal_tp(TOWER, 7) == (
        "heads 16 / tp 7 = 2.286 is not whole; ffn 4304 / tp 7 = 614.9 is not whole; tp can be 1, 2, 4, 8, 16"
    )


def test_projector_is_cut_by_its_inner_widths() -> None:
    told = legal_tp(Mlp(arch="mlp", dims=(5, 8, 12, 7)), 8)
    assert told == "width 12 / tp 8 = 1.5 is not whole; tp can be 1, 2, 4"


def test_equal_stages() -> None:
    assert legal_pp(LLAMA70B, 4, 1, None) is None
    assert legal_pp(LLAMA70B, 4, 5, None) is None
    assert legal_pp(LLAMA70B, 3, 1, None) == (
        "layers 80 / pp 3 = 26.67 is not whole; pp can be 1, 2, 4, 5, 8, 10, 16, 20, 40, 80, "
        "or give layers_per_stage with 3 counts that add up to 80"
    )
    assert "layers 80 / (pp 4 x vpp 3) = 6.667 is not whole; pp x vpp can be 1, 2" in str(
        legal_pp(LLAMA70B, 4, 3, None)
    )


def test_uneven_stages_need_their_counts() -> None:
    assert legal_pp(LLAMA70B, 3, 1, (26, 28, 26)) is None
    assert legal_pp(LLAMA70B, 3, 1, (40, 40)) == (
        "layers_per_stage has 2 counts, but pp is 3; give one count per stage"
    )
    assert legal_pp(LLAMA70B, 3, 1, (26, 26, 26)) == (
        "layers_per_stage: 26 + 26 + 26 = 78, but there are 80 layers to share out"
    )
    assert legal_pp(LLAMA70B, 3, 2, (26, 27, 27)) == (
        "layers_per_stage: 27, 27 / vpp 2 is not whole; give multiples of 2"
    )


def test_the_embedding_and_the_loss_count_where_they_make_stages_equal() -> None:
    assert legal_pp(LLAMA70B, 3, 3, (26, 27, 27)) is None
    assert counted_ends((26, 27, 27), 3) == (True, False)
    assert counted_ends((7, 8, 8, 7), 8) == (True, True)
    assert counted_ends((7, 8, 8, 7), 1) == (False, False)
    assert counted_ends((8, 8), 2) == (False, False)
    assert counted_ends((7, 8, 7, 7), 8) == (False, False)
    assert counted_ends((6, 8, 8, 8), 8) == (False, False)


def test_mlp_stays_on_one_stage() -> None:
    assert legal_pp(PROJECTOR, 1, 1, None) is None
    assert legal_pp(PROJECTOR, 2, 1, None) == (
        "an MLP is not cut into stages, found pp 2 x vpp 1; pp and vpp can be 1"
    )


def test_fifteen_heads_and_five_kv_heads() -> None:
    """SmolVLA: 15 of 5 kv heads and an MLP of 2560 leave tp 1 and 5."""
    smol = Decoder(arch="decoder", layers=16, hidden=960, heads=15, kv_heads=5, ffn=2560, vocab=49280)
    assert legal_tp(smol, 5) is None
    assert legal_tp(smol, 2) == (
        "heads 15 / tp 2 = 7.5 is not whole; kv_heads 5 and tp 2: neither divides the other; tp can be 1, 5"
    )
    assert str(legal_tp(smol, 3)).endswith("tp can be 1, 5")


def test_experts_are_cut_by_their_own_width_and_shared_out_by_ep() -> None:
    experts = Experts(count=60, top_k=4, ffn=1408, shared_ffn=5632)
    moe = decoder(heads=16, kv_heads=16, ffn=5632).model_copy(update={"experts": experts})
    assert legal_tp(moe, 16) is None
    told = legal_tp(moe.model_copy(update={"experts": experts.model_copy(update={"ffn": 1404})}), 8)
    assert told == "experts.ffn 1404 / tp 8 = 175.5 is not whole; tp can be 1, 2, 4"
    assert legal_ep(moe, 12) is None
    assert legal_ep(moe, 8) == (
        "experts.count 60 / ep 8 = 7.5 is not whole; ep can be 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60"
    )
    assert legal_ep(QWEN, 2) == "there are no experts to share out; ep can be 1"
    assert legal_etp(moe, 4, most=8) is None
    assert legal_etp(moe, 3, most=8) == "experts.ffn 1408 / etp 3 = 469.3 is not whole; etp can be 1, 2, 4, 8"
    narrow = moe.model_copy(update={"experts": experts.model_copy(update={"ffn": 1404})})
    assert legal_tp(narrow, 8, experts_apart=True) is None


def test_what_is_never_cut() -> None:
    head = Mlp(arch="mlp", dims=(28672, 4096, 7), inner_norms=True)
    assert legal_tp(head, 1) is None
    assert legal_tp(head, 2) == "an MLP with inner_norms is not cut, found tp 2; tp can be 1"
    davit = Other(arch="other", params=10, hidden=4, tokens=2, gflops=1.0, activation_mib=1.0)
    assert legal_tp(davit, 2) == "a network given by its figures is not cut, found tp 2; tp can be 1"
    assert "pp and vpp can be 1" in str(legal_pp(davit, 2, 1, None))
