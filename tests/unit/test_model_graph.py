"""A model as a graph: its trunk, what shares a mesh, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dslaunch.schema.model import Model

LLM = {"arch": "decoder", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 100}
EXPERT = {"arch": "transformer", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64}
DIT = {"arch": "transformer", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64}


def model(components: dict[str, dict[str, Any]], *edges: tuple[str, str, str]) -> Model:
    listed = [{"from": a, "to": b, "tokens": 8, "join": join} for a, b, join in edges]
    return Model.model_validate({"name": "test", "components": components, "edges": listed})


def test_the_trunk_is_the_largest_decoder() -> None:
    small = {**LLM, "layers": 2}
    graph = model({"draft": small, "llm": LLM, "head": DIT}, ("llm", "head", "sequence"), ("draft", "llm", "add"))
    assert graph.trunk == "llm"


def test_without_a_decoder_it_is_the_last_component_with_layers() -> None:
    out = {"arch": "mlp", "dims": [32, 7]}
    edges = ("text", "dit", "sequence"), ("dit", "out", "sequence")
    graph = model({"text": EXPERT, "dit": DIT, "out": out}, *edges)
    assert graph.trunk == "dit"


def test_shared_attention_makes_one_mesh() -> None:
    edges = ("llm", "expert", "shared_attention"), ("expert", "head", "sequence")
    graph = model({"llm": LLM, "expert": EXPERT, "head": DIT}, *edges)
    assert graph.fused("llm") == graph.fused("expert") == {"llm", "expert"}
    assert graph.fused("head") == {"head"}


@pytest.mark.parametrize(
    ("other", "join", "told"),
    [
        ({**EXPERT, "layers": 3}, "shared_attention", r"\(4, 4, 2, 16\) and \(3, 4, 2, 16\), and must be equal"),
        ({**EXPERT, "head_dim": 8}, "shared_attention", r"\(4, 4, 2, 16\) and \(4, 4, 2, 8\)"),
        ({"arch": "mlp", "dims": [64, 7]}, "shared_attention", "takes a decoder or transformer at both ends"),
        (DIT, "cross_attention", r"other has no `cross: \{width: ...\}`"),
    ],
)
def test_joins_that_do_not_fit_are_refused(other: dict[str, Any], join: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        model({"llm": LLM, "other": other}, ("llm", "other", join))


def test_a_model_has_layers_somewhere() -> None:
    with pytest.raises(ValidationError, match="no component has layers"):
        model({"out": {"arch": "mlp", "dims": [32, 7]}})
