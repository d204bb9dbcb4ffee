"""Every file in conf/model: valid, with its source, and as large as its comment says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from dslaunch.model.blocks import head_dim
from dslaunch.model.params import params, params_on_rank, trainable
from dslaunch.model.shapes import layers, legal_tp, width_out
from dslaunch.model.tokens import own_tokens, reads
from dslaunch.paths import data_root
from dslaunch.schema.model import Component, Decoder, Mlp, Model, Transformer, ViT

FILES = sorted((data_root() / "conf" / "model").glob("*.yaml"))


def load(path: Path) -> Model:
    return Model.model_validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model_file_is_valid_and_named_after_its_file(path: Path) -> None:
    model = load(path)
    assert model.name == path.stem
    assert model.source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_edges_carry_what_a_tower_puts_out_into_widths_that_fit(path: Path) -> None:
    model = load(path)
    for edge in model.edges:
        source, target = model.components[edge.source], model.components[edge.to]
        if isinstance(source, ViT):
            assert edge.tokens == source.patches * source.passes
        if isinstance(target, Transformer) and edge.join == "cross_attention":
            keys = source.kv_heads * head_dim(source) if isinstance(source, Decoder) else 0
            assert target.cross is not None
            assert target.cross.width in (width_out(source), keys, target.hidden)
        elif edge.join in ("sequence", "add") and not isinstance(target, Mlp):
            assert width_out(source) == target.hidden
    for name, component in model.components.items():
        towers = [edge for edge in model.edges if edge.to == name and edge.join in ("sequence", "channel")]
        sources = [model.components[edge.source] for edge in towers]
        if isinstance(component, Mlp) and sources and all(isinstance(c, ViT) for c in sources):
            assert component.dims[0] == component.merge * sum(width_out(c) for c in sources)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_comment_above_says_how_large_it_is(path: Path) -> None:
    """Except where the file is made for this project."""
    model = load(path)
    if path.stem in ("vla70b", "vla_tiny"):
        return
    total = sum(params(component) for component in model.components.values())
    assert path.read_text().startswith(f"# {total:,} parameters")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gr00t_n1_2b", 857_884_160),  # NVIDIA/Isaac-GR00T issue 24, a log of the authors' script
        ("smolvla_450m", 99_880_992),  # lerobot's log: num_learnable_params=99880992
        ("rdt_1b", 1_228_319_872),  # as the authors' script prints: Diffusion params: 1.228320e+09
    ],
)
def test_as_many_train_as_their_authors_say(name: str, count: int) -> None:
    model = load(data_root() / "conf" / "model" / f"{name}.yaml")
    assert sum(trainable(component) for component in model.components.values()) == count


@pytest.mark.parametrize(
    ("name", "trunk", "tokens"),
    [
        ("pi0", "llm", {"vision_encoder": 256, "projector": 256, "action_expert": 51, "action_out": 50}),
        ("openvla_oft_7b", "llm", {"siglip": 256, "projector": 256, "action_head": 8}),
        ("qwen2_5_vl_7b", "llm", {"vision_encoder": 1024, "projector": 256}),
        ("gemma3_4b", "llm", {"vision_encoder": 4096, "projector": 256}),
        ("gr00t_n1_5_3b", "llm", {"vl_self_attention": 320, "action_dit": 1 + 32 + 16, "time_encoder": 1}),
        ("rdt_1b", "rdt", {"text_encoder": 1024, "image_adaptor": 729, "state_adaptor": 65}),
        ("cogact_base", "llm", {"action_dit": 17, "condition_encoder": 1}),
        ("x_vla_0_9b", "action_transformer", {"vision_encoder": 50, "text_encoder": 114}),
        ("dinov2_l", "vision_encoder", {"vision_encoder": 37 * 37 + 1}),
    ],
)
def test_tokens_of_one_pass(name: str, trunk: str, tokens: dict[str, int]) -> None:
    model = load(data_root() / "conf" / "model" / f"{name}.yaml")
    assert model.trunk == trunk
    assert {part: own_tokens(model, part, 2048) for part in tokens} == tokens


def test_what_attention_reads_of_other_components() -> None:
    pi0, rdt, smolvla = (
        load(data_root() / "conf" / "model" / f"{name}.yaml") for name in ("pi0", "rdt_1b", "smolvla_450m")
    )
    assert reads(pi0, "action_expert").shared == 768 + 48
    assert reads(pi0, "llm").shared == 0
    assert [reads(rdt, "rdt").cross_at(layer) for layer in (0, 1, 26, 27)] == [1024, 4374, 1024, 4374]
    assert [reads(smolvla, "action_expert").cross_at(layer) for layer in (0, 1)] == [0, 241]
    assert pi0.fused("llm") == {"llm", "action_expert"}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("openvla_7b", 7_541_237_184),  # bf16 safetensors of 15,082,474,368 bytes
        ("vla70b", 70_553_706_496 + 1_011_203_840 + 78_659_584),
        ("vla_tiny", 766_144),
        ("internvl2_8b", 8_075_365_376),
        ("smolvla_450m", 450_046_176),  # lerobot's log: num_total_params=450046176
        ("gpt3_175b", 174_604_259_328),
    ],
)
def test_published_sizes(name: str, count: int) -> None:
    model = load(data_root() / "conf" / "model" / f"{name}.yaml")
    assert sum(params(component) for component in model.components.values()) == count


def components() -> list[tuple[str, Component]]:
    return [
        (f"{path.stem}.{name}", component)
        for path in FILES
        for name, component in load(path).components.items()
    ]


EVERY = components()


@pytest.mark.parametrize("component", [row[1] for row in EVERY], ids=[row[0] for row in EVERY])
def test_stages_of_every_component_add_up_to_the_whole(component: Component) -> None:
    total = layers(component)
    cuts = sorted({0, 1, total // 2, total})
    stages = sum(params_on_rank(component, 1, a, b - a) for a, b in pairwise(cuts) if a < b)
    # Layers that predict further tokens stand on the last stage, with an embedding of their own.
    twice = isinstance(component, Decoder) and (component.tied_embeddings or component.mtp_layers > 0)
    tied = twice and len(cuts) > 2
    table = component.vocab * component.hidden if tied else 0
    assert stages == params(component) + table


@pytest.mark.parametrize("component", [row[1] for row in EVERY], ids=[row[0] for row in EVERY])
def test_legal_ranks_of_every_component_hold_the_whole_and_replicas(component: Component) -> None:
    """tp * rank - whole = (tp - 1) * what is replicated, whatever tp is; a padded vocabulary adds to it."""
    kv = getattr(component, "kv_heads", None) or 8
    replicas = set()
    for tp in (2, 4, 8):
        if legal_tp(component, tp) or kv % tp:
            continue
        on_all = tp * params_on_rank(component, tp, 0, layers(component))
        if isinstance(component, Decoder):
            rows = -(-component.vocab // tp) * tp - component.vocab
            on_all -= rows * component.hidden * (1 if component.tied_embeddings else 2)
        replicas.add((on_all - params(component)) / (tp - 1))
    assert len(replicas) <= 1
