"""What trains: frozen components, adapters, chosen layers."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from dslaunch.model.params import counts, params, trainable
from dslaunch.paths import data_root
from dslaunch.schema.layer import Lora
from dslaunch.schema.model import Component, Decoder, Mlp, Model

LLAMA = Decoder(arch="decoder", layers=4, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=100)
EVERY_MATRIX = ("q", "k", "v", "o", "gate", "up", "down")


def with_lora(component: Component, rank: int, *targets: str, train: str = "lora") -> Component:
    lora = {"rank": rank, "targets": targets} if targets else {"rank": rank}
    fields = {**component.model_dump(), "train": train, "lora": lora}
    return type(component).model_validate(fields)


def test_adapters_by_hand() -> None:
    adapters = 8 * 4 * ((64 + 64) + 2 * (64 + 16) + (64 + 64) + 2 * (64 + 96) + (96 + 64))
    tuned = with_lora(LLAMA, 8)
    assert trainable(tuned) == adapters
    assert params(tuned) == params(LLAMA) + adapters
    assert trainable(with_lora(LLAMA, 8, "q", "v")) == 8 * 4 * ((64 + 64) + (64 + 16))


def test_openvla_adapters_as_published() -> None:
    """`trainable params: 110,828,288 || all params: 7,652,065,472`, as peft printed for rank 32 on all linear
    layers of openvla/openvla-7b: the patch embeddings, the pooling head and the LLM's head are among them."""
    file = data_root() / "conf" / "model" / "openvla_7b.yaml"
    model = Model.model_validate(yaml.safe_load(file.read_text()))
    tower = ("qkv", "o", "up", "down", "patch", "pooling")
    tuned = [
        with_lora(model.components["dinov2"], 32, *tower),
        with_lora(model.components["siglip"], 32, *tower),
        with_lora(model.components["projector"], 32),
        with_lora(model.components["llm"], 32, *EVERY_MATRIX, "output"),
    ]
    assert sum(trainable(component) for component in tuned) == 110_828_288
    assert sum(params(component) for component in tuned) == 7_652_065_472


def test_an_adapter_is_cut_as_its_matrix_is() -> None:
    """Of the two small matrices one is cut by tp, the other whole on every rank."""
    tuned = with_lora(LLAMA, 8, "q", "down")
    assert counts(tuned, 2, 0, 1).trained == 8 * ((64 + 64 // 2) + (96 // 2 + 64))


def test_qlora_packs_the_matrices_of_layers() -> None:
    tuned = with_lora(LLAMA, 8, train="qlora")
    held = counts(tuned, 1, 0, 4)
    norms, tables = (2 * 4 + 1) * 64, 2 * 100 * 64
    assert held.packed == params(LLAMA) - norms - tables
    assert counts(with_lora(LLAMA, 8), 1, 0, 4).packed == 0


def test_chosen_layers_train() -> None:
    layer = params(LLAMA.model_copy(update={"layers": 5})) - params(LLAMA)
    last_two = Decoder.model_validate({**LLAMA.model_dump(), "train": "layers", "train_layers": [-2, -1]})
    assert trainable(last_two) == 2 * layer
    assert counts(last_two, 1, 0, 2).trained == 0
    assert counts(last_two, 1, 2, 2).trained == 2 * layer
    with_head = {**last_two.model_dump(), "train_ends": ["tail"]}
    assert trainable(Decoder.model_validate(with_head)) == 2 * layer + 64 + 100 * 64


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"train": "lora"}, "lora is missing: give it, such as lora.rank=16"),
        ({"lora": {"rank": 8}}, "train is all, and lora is given, .* or lora=null"),
        ({"train": "layers"}, "needs train_layers or train_ends"),
        ({"train": "layers", "train_layers": [4]}, "train_layers names 4, but there are layers 0 to 3"),
        ({"train": "lora", "lora": {"rank": 8, "targets": ["query"]}}, "Input should be 'q', 'k'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Decoder.model_validate({**LLAMA.model_dump(), **fields})


def test_every_matrix_of_an_mlp_gets_an_adapter() -> None:
    assert trainable(with_lora(Mlp(arch="mlp", dims=(6, 8, 4)), 2)) == 2 * ((6 + 8) + (8 + 4))
    assert Lora(rank=2).alpha is None
