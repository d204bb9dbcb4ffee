"""Parameter counts against the classes of transformers, built on the meta device: shapes without memory.

The classes get what the model file says; where a configuration class has the published model as its default, it
is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
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


def model(name: str) -> Model:
    text = (data_root() / "conf" / "model" / f"{name}.yaml").read_text()
    return Model.model_validate(yaml.safe_load(text))


def component(name: str, part: str) -> Any:
    return model(name).components[part]


def count(kind: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in kind(config).parameters())


def text(decoder: Decoder) -> dict[str, Any]:
    """The keys that the configurations of language models share."""
    keys = {
        "vocab_size": decoder.vocab,
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.ffn,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "tie_word_embeddings": decoder.tied_embeddings,
    }
    return keys | ({"head_dim": decoder.head_dim} if decoder.head_dim else {})


def mixture(decoder: Decoder) -> dict[str, Any]:
    """Keys of mixtures whose experts have a width of their own; shared experts are multiples of it."""
    experts = decoder.experts
    assert experts is not None
    return {
        "num_experts": experts.count,
        "n_routed_experts": experts.count,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "first_k_dense_replace": experts.dense_layers,
        "attention_bias": decoder.qkv_bias,
    }


def latent(decoder: Decoder) -> dict[str, Any]:
    return mixture(decoder) | decoder.mla.model_dump() if decoder.mla else {}


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def hybrid(decoder: Decoder) -> dict[str, Any]:
    mamba, experts = decoder.mamba, decoder.experts
    assert mamba is not None
    keys = {
        "layers_block_type": [_BLOCKS[letter] for letter in decoder.pattern],
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state,
        "n_groups": mamba.groups,
        "conv_kernel": mamba.conv,
    }
    if experts is None:
        return keys
    routed = mixture(decoder) | {"moe_shared_expert_intermediate_size": experts.shared_ffn}
    return keys | routed | {"n_shared_experts": 1, "moe_latent_size": experts.latent or None}


def vision(tower: ViT) -> dict[str, Any]:
    return {
        "hidden_size": tower.hidden,
        "intermediate_size": tower.ffn,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "patch_size": tower.patch,
        "image_size": tower.image,
        "num_channels": tower.channels,
    }


def nothing(_: Decoder) -> dict[str, Any]:
    return {}


LANGUAGE: list[tuple[str, str, Callable[[Decoder], dict[str, Any]], int]] = [
    ("llama2_7b", "Llama", nothing, 6_738_415_616),
    ("llama2_13b", "Llama", nothing, 13_015_864_320),
    ("llama2_70b", "Llama", nothing, 68_976_648_192),
    ("llama3_8b", "Llama", nothing, 8_030_261_248),
    ("llama3_70b", "Llama", nothing, 70_553_706_496),
    ("llama3_1_8b", "Llama", nothing, 8_030_261_248),
    ("llama3_1_70b", "Llama", nothing, 70_553_706_496),
    ("llama3_405b", "Llama", nothing, 405_853_388_800),
    ("openvla_7b", "Llama", nothing, 6_738_939_904),
    ("vla70b", "Llama", nothing, 70_553_706_496),
    ("vla_tiny", "Llama", nothing, 672_896),
    ("mistral_7b", "Mistral", nothing, 7_241_732_096),
    ("mixtral_8x7b", "Mixtral", mixture, 46_702_792_704),
    ("mixtral_8x22b", "Mixtral", mixture, 140_630_071_296),
    ("qwen2_5_0_5b", "Qwen2", nothing, 494_032_768),
    ("qwen2_5_1_5b", "Qwen2", nothing, 1_543_714_304),
    ("qwen2_5_3b", "Qwen2", nothing, 3_085_938_688),
    ("qwen2_5_7b", "Qwen2", nothing, 7_615_616_512),
    ("qwen2_5_14b", "Qwen2", nothing, 14_770_033_664),
    ("qwen2_5_32b", "Qwen2", nothing, 32_763_876_352),
    ("qwen2_5_72b", "Qwen2", nothing, 72_706_203_648),
    ("qwen3_0_6b", "Qwen3", nothing, 596_049_920),
    ("qwen3_1_7b", "Qwen3", nothing, 1_720_574_976),
    ("qwen3_4b", "Qwen3", nothing, 4_022_468_096),
    ("qwen3_8b", "Qwen3", nothing, 8_190_735_360),
    ("qwen3_14b", "Qwen3", nothing, 14_768_307_200),
    ("qwen3_32b", "Qwen3", nothing, 32_762_123_264),
    ("qwen3_30b_a3b", "Qwen3Moe", mixture, 30_532_122_624),
    ("qwen3_235b_a22b", "Qwen3Moe", mixture, 235_093_634_560),
    ("gemma2_2b", "Gemma2", nothing, 2_614_341_888),
    ("gemma2_9b", "Gemma2", nothing, 9_241_705_984),
    ("gemma2_27b", "Gemma2", nothing, 27_227_128_320),
    ("gemma3_1b", "Gemma3", nothing, 999_885_952),
    ("deepseek_v3", "DeepseekV3", latent, 671_026_404_352),
    ("glm4_5_air", "Glm4Moe", mixture, 106_852_245_504),
    ("nemotron_h_8b", "NemotronH", hybrid, 8_100_852_736),
    ("nemotron_3_nano_30b_a3b", "NemotronH", hybrid, 31_577_937_344),
    ("nemotron_3_super_120b_a12b", "NemotronH", hybrid, 120_668_687_360),
]
"""Model file, family in transformers, further keys of its configuration, published size."""


@pytest.mark.parametrize(("name", "family", "more", "published"), LANGUAGE, ids=[row[0] for row in LANGUAGE])
def test_language_model(
    name: str, family: str, more: Callable[[Decoder], dict[str, Any]], published: int
) -> None:
    """transformers leaves out the layers that predict further tokens."""
    decoder = component(name, "llm").model_copy(update={"mtp_layers": 0})
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**text(decoder), **more(decoder))
    assert params(decoder) == count(kind, config) == published


@pytest.mark.parametrize(
    ("name", "width", "layers", "heads"),
    [
        ("gpt2", 768, 12, 12),
        ("gpt2_medium", 1024, 24, 16),
        ("gpt2_large", 1280, 36, 20),
        ("gpt2_xl", 1600, 48, 25),
        ("gpt3_175b", 12288, 96, 96),
    ],
)
def test_gpt(name: str, width: int, layers: int, heads: int) -> None:
    decoder = component(name, "llm")
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, n_positions=decoder.max_positions
    )
    assert params(decoder) == count(transformers.GPT2LMHeadModel, config)


def test_tied_llama() -> None:
    decoder = component("llama3_8b", "llm").model_copy(update={"tied_embeddings": True})
    config = transformers.LlamaConfig(**text(decoder))
    assert params(decoder) == count(transformers.LlamaForCausalLM, config)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mistral_7b", "Mistral"),
        ("mixtral_8x7b", "Mixtral"),
        ("deepseek_v3", "DeepseekV3"),
        ("llama2_7b", "Llama"),
    ],
)
def test_a_configuration_as_transformers_has_it_by_default(name: str, family: str) -> None:
    decoder = component(name, "llm").model_copy(update={"mtp_layers": 0})
    kind = getattr(transformers, f"{family}ForCausalLM")
    assert params(decoder) == count(kind, kind.config_class())


TOWERS: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("vla70b", "vision_encoder", "CLIPVisionModel", "CLIPVisionConfig", {}),
    ("clip_vit_g_14", "vision_encoder", "CLIPVisionModel", "CLIPVisionConfig", {}),
    ("clip_vit_l_14", "vision_encoder", "CLIPVisionModel", "CLIPVisionConfig", {}),
    ("clip_vit_l_14_336", "vision_encoder", "CLIPVisionModel", "CLIPVisionConfig", {}),
    ("openvla_7b", "siglip", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ("siglip_base_16_224", "vision_encoder", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ("siglip_so400m_14_224", "vision_encoder", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ("siglip_so400m_14_384", "vision_encoder", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ("vla_tiny", "vision_encoder", "SiglipVisionModel", "SiglipVisionConfig", {"vision_use_head": False}),
    ("internvit_300m", "vision_encoder", "InternVLVisionModel", "InternVLVisionConfig", {"attention_bias": True}),
]


@pytest.mark.parametrize(("name", "part", "kind", "config", "more"), TOWERS, ids=[row[0] for row in TOWERS])
def test_tower(name: str, part: str, kind: str, config: str, more: dict[str, Any]) -> None:
    """CLIPVisionModel has no projection to the text space, as the component has none."""
    tower = component(name, part)
    keys = vision(tower)
    if kind == "InternVLVisionModel":
        keys |= {"image_size": [tower.image] * 2, "patch_size": [tower.patch] * 2}
    made = getattr(transformers, config)(**keys, **more)
    mask_token = tower.hidden if kind == "InternVLVisionModel" and made.use_mask_token else 0
    assert params(tower) == count(getattr(transformers, kind), made) - mask_token


@pytest.mark.parametrize("name", ["vit_b_16", "vit_l_16", "vit_h_14"])
def test_vit_without_its_pooler(name: str) -> None:
    tower = component(name, "vision_encoder")
    with torch.device("meta"):
        built = transformers.ViTModel(transformers.ViTConfig(**vision(tower)), add_pooling_layer=False)
    assert params(tower) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", ["dinov2_s", "dinov2_b", "dinov2_l", "dinov2_g"])
def test_dinov2_without_its_mask_token(name: str) -> None:
    tower = component(name, "vision_encoder")
    config = transformers.Dinov2Config(**vision(tower), use_swiglu_ffn=tower.gated_mlp)
    assert params(tower) == count(transformers.Dinov2Model, config) - tower.hidden


def test_dinov2_with_registers() -> None:
    """transformers has a mask token and a position of the class token; timm, which OpenVLA uses, neither."""
    tower = component("openvla_7b", "dinov2")
    config = transformers.Dinov2WithRegistersConfig(**vision(tower), num_register_tokens=tower.registers)
    mask_token = class_position = tower.hidden
    built = count(transformers.Dinov2WithRegistersModel, config)
    assert params(tower) == built - mask_token - class_position == 303_230_976


def whole(name: str) -> int:
    return sum(params(part) for part in model(name).components.values())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2_5_vl_3b", 3_754_622_976),
        ("qwen2_5_vl_7b", 8_292_166_656),
        ("qwen2_5_vl_32b", 33_452_718_336),
        ("qwen2_5_vl_72b", 73_410_777_344),
    ],
)
def test_qwen2_5_vl(name: str, published: int) -> None:
    decoder, tower = component(name, "llm"), component(name, "vision_encoder")
    config = transformers.Qwen2_5_VLConfig(
        text_config=text(decoder),
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.hidden,
            "intermediate_size": tower.ffn,
            "num_heads": tower.heads,
            "out_hidden_size": decoder.hidden,
        },
        tie_word_embeddings=decoder.tied_embeddings,
    )
    assert whole(name) == count(transformers.Qwen2_5_VLForConditionalGeneration, config) == published


@pytest.mark.parametrize(
    ("name", "published"), [("llava_1_5_7b", 7_063_427_072), ("llava_1_5_13b", 13_351_494_656)]
)
def test_llava(name: str, published: int) -> None:
    decoder, tower = component(name, "llm"), component(name, "vision_encoder")
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text(decoder)),
        vision_config=transformers.CLIPVisionConfig(**vision(tower)),
    )
    assert whole(name) == count(transformers.LlavaForConditionalGeneration, config) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [("gemma3_4b", 4_300_079_472), ("gemma3_12b", 12_187_325_040), ("gemma3_27b", 27_432_406_640)],
)
def test_gemma3_with_its_tower(name: str, published: int) -> None:
    decoder, tower = component(name, "llm"), component(name, "vision_encoder")
    config = transformers.Gemma3Config(
        text_config=text(decoder), vision_config=vision(tower) | {"vision_use_head": False}
    )
    assert whole(name) == count(transformers.Gemma3ForConditionalGeneration, config) == published


def test_internvl3_8b() -> None:
    decoder, tower = component("internvl3_8b", "llm"), component("internvl3_8b", "vision_encoder")
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**text(decoder)),
        vision_config={
            **vision(tower), "attention_bias": True, "image_size": [448, 448], "patch_size": [14, 14],
        },
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )  # fmt: skip
    assert whole("internvl3_8b") == count(transformers.InternVLForConditionalGeneration, config) == 7_944_373_760


def test_pi0() -> None:
    """transformers gives the expert a token table, which openpi has not."""
    config = transformers.PI0Config()
    expert = component("pi0", "action_expert")
    table = config.dit_config.vocab_size * expert.hidden
    assert whole("pi0") == count(transformers.PI0ForConditionalGeneration, config) - table


def test_smolvla_without_its_expert() -> None:
    decoder, tower = component("smolvla_450m", "llm"), component("smolvla_450m", "vision_encoder")
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**text(decoder)),
        vision_config=vision(tower),
        scale_factor=4,
        tie_word_embeddings=False,
    )
    parts = ("vision_encoder", "projector", "llm")
    counted = sum(params(component("smolvla_450m", part)) for part in parts)
    assert counted == count(transformers.SmolVLMForConditionalGeneration, config)


def test_qwen3_vl_with_deepstack() -> None:
    name = "starvla_qwen3vl4b"
    decoder, tower = component(name, "llm"), component(name, "vision_encoder")
    config = transformers.Qwen3VLConfig(
        text_config=text(decoder),
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.hidden,
            "intermediate_size": tower.ffn,
            "num_heads": tower.heads,
            "out_hidden_size": decoder.hidden,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tie_word_embeddings=True,
    )
    mergers = ("projector", "deepstack_5", "deepstack_11", "deepstack_17")
    counted = sum(params(component(name, part)) for part in ("vision_encoder", *mergers, "llm"))
    assert counted == count(transformers.Qwen3VLForConditionalGeneration, config) == 4_437_815_808


def test_t5_encoder() -> None:
    encoder = component("rdt_1b", "text_encoder")
    config = transformers.T5Config(
        d_model=encoder.hidden, d_kv=encoder.head_dim or encoder.hidden // encoder.heads, d_ff=encoder.ffn,
        num_layers=encoder.layers, num_heads=encoder.heads, vocab_size=encoder.vocab,
        relative_attention_num_buckets=encoder.position_buckets, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    assert params(encoder) == count(transformers.T5EncoderModel, config)


def test_florence_2_large() -> None:
    """X-VLA's tower, projector and text encoder."""
    encoder = component("x_vla_0_9b", "text_encoder")
    widths, heads = [256, 512, 1024, 2048], [8, 16, 32, 64]
    config = transformers.Florence2Config(
        vision_config={
            "model_type": "florence_vision", "embed_dim": widths, "num_heads": heads, "num_groups": heads,
            "projection_dim": encoder.hidden,
        },
        text_config={
            "model_type": "bart", "d_model": encoder.hidden, "vocab_size": encoder.vocab,
            "max_position_embeddings": 4096, "encoder_layers": encoder.layers, "encoder_ffn_dim": encoder.ffn,
            "encoder_attention_heads": encoder.heads,
        },
    )  # fmt: skip
    with torch.device("meta"):
        built = transformers.Florence2Model(config)
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in built.named_children()}
    tower = params(component("x_vla_0_9b", "vision_encoder"))
    assert tower == sizes["vision_tower"] + sizes["multi_modal_projector"]
    assert params(encoder) == sum(p.numel() for p in built.language_model.encoder.parameters())
