"""What a user is told when a component can't be cut as asked."""

from __future__ import annotations

import pytest

from dslaunch.model.shapes import legal_pp, legal_tp
from dslaunch.schema.model import Decoder, Mlp, ViT


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


def test_mlp_stays_on_one_stage() -> None:
    assert legal_pp(PROJECTOR, 1, 1, None) is None
    assert legal_pp(PROJECTOR, 2, 1, None) == (
        "an MLP is not cut into stages, found pp 2 x vpp 1; pp and vpp can be 1"
    )
