"""Parameter counts against the classes of transformers, built on the meta device: shapes without memory."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dslaunch.model.params import params
from dslaunch.paths import data_root
from dslaunch.schema.model import Decoder, Model, ViT
from tests.real.parts import need

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402


def component(model: str, name: str) -> Any:
    text = (data_root() / "conf" / "model" / f"{model}.yaml").read_text()
    return Model.model_validate(yaml.safe_load(text)).components[name]


def count(kind: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in kind(config).parameters())


def llama(decoder: Decoder) -> int:
    config = transformers.LlamaConfig(
        vocab_size=decoder.vocab,
        hidden_size=decoder.hidden,
        intermediate_size=decoder.ffn,
        num_hidden_layers=decoder.layers,
        num_attention_heads=decoder.heads,
        num_key_value_heads=decoder.kv_heads,
        tie_word_embeddings=decoder.tied_embeddings,
    )
    return count(transformers.LlamaForCausalLM, config)


def vision(config_kind: Any, tower: ViT, **more: Any) -> Any:
    return config_kind(
        hidden_size=tower.hidden,
        intermediate_size=tower.ffn,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        image_size=tower.image,
        num_channels=tower.channels,
        **more,
    )


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("openvla_7b", 6_738_939_904),
        ("vla70b", 70_553_706_496),
        ("vla_tiny", 672_896),
    ],
)
def test_llama(model: str, published: int) -> None:
    decoder = component(model, "llm")
    assert params(decoder) == llama(decoder) == published


def test_tied_llama() -> None:
    decoder = component("llama3_8b", "llm").model_copy(update={"tied_embeddings": True})
    assert params(decoder) == llama(decoder)


def test_gpt2_with_biases_layernorm_and_learned_positions() -> None:
    config = transformers.GPT2Config()
    decoder = Decoder(
        arch="decoder",
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        ffn=4 * config.n_embd,
        vocab=config.vocab_size,
        tied_embeddings=True,
        gated_mlp=False,
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        position="learned",
        max_positions=config.n_positions,
    )
    assert params(decoder) == count(transformers.GPT2LMHeadModel, config) == 124_439_808


def test_clip_vit_g() -> None:
    """CLIPVisionModel has no projection to the text space, as the component has none."""
    tower = component("vla70b", "vision_encoder")
    config = vision(transformers.CLIPVisionConfig, tower)
    assert params(tower) == count(transformers.CLIPVisionModel, config) == 1_011_203_840


def test_siglip_with_its_pooling_head() -> None:
    tower = component("openvla_7b", "siglip")
    config = vision(transformers.SiglipVisionConfig, tower)
    assert params(tower) == count(transformers.SiglipVisionModel, config) == 427_680_704


def test_tiny_tower() -> None:
    tower = component("vla_tiny", "vision_encoder")
    config = vision(transformers.SiglipVisionConfig, tower, vision_use_head=False)
    assert params(tower) == count(transformers.SiglipVisionModel, config)


def test_dinov2_with_registers() -> None:
    """transformers has a mask token and a position of the class token; timm, which OpenVLA uses, neither."""
    tower = component("openvla_7b", "dinov2")
    config = vision(transformers.Dinov2WithRegistersConfig, tower, num_register_tokens=tower.registers)
    mask_token = class_position = tower.hidden
    built = count(transformers.Dinov2WithRegistersModel, config)
    assert params(tower) == built - mask_token - class_position == 303_230_976


def test_dinov2_without_registers_has_a_position_for_its_class_token() -> None:
    tower = component("openvla_7b", "dinov2").model_copy(update={"registers": 0})
    mask_token = tower.hidden
    config = vision(transformers.Dinov2Config, tower)
    assert params(tower) == count(transformers.Dinov2Model, config) - mask_token
