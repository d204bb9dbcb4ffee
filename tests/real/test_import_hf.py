"""Imported models have as many parameters as transformers' own classes, built on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.importing.hf import import_hf
from dslaunch.importing.hf_fields import class_defaults
from dslaunch.model.params import params
from dslaunch.schema.model import Model
from tests.real.parts import need

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

CAUSAL: dict[str, dict[str, Any]] = {
    # Sizes of published models, as their config.json has them; what is left out is the class's default.
    "llama3_8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
    "llama_biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "llama_default": {"model_type": "llama"},
    "mistral_7b": {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None},
    "mistral_nemo": {
        "model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40,
        "vocab_size": 131072, "sliding_window": None,
    },
    "mixtral_8x7b": {"model_type": "mixtral"},
    "qwen2_5_0_5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen1_5_moe": {"model_type": "qwen2_moe"},
    "qwen3_8b": {
        "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128,
    },
    "qwen3_moe_dense_start": {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 1], "head_dim": 128,
    },
    "gemma_7b": {"model_type": "gemma"},
    "gemma2_2b": {"model_type": "gemma2"},
    "gemma3_1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
        "num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512,
    },
    "gpt2_xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt2_own_width": {"model_type": "gpt2", "n_inner": 1000},
    "deepseek_v3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "deepseek_small": {
        "model_type": "deepseek_v3", "q_lora_rank": None, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "n_routed_experts": 16,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
    },
    "phi3_mini": {"model_type": "phi3"},
    "gpt_oss_120b": {"model_type": "gpt_oss"},
    "gpt_oss_20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "granite": {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
    "smollm3_3b": {"model_type": "smollm3"},
    "starcoder2_3b": {"model_type": "starcoder2"},
    "starcoder2_unbiased": {"model_type": "starcoder2", "use_bias": False, "tie_word_embeddings": False},
    "seed_oss_36b": {"model_type": "seed_oss", "hidden_size": 5120},
    "seed_oss_biased": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "glm4_9b": {"model_type": "glm4"},
    "llama4_scout_text": {"model_type": "llama4_text"},
    "falcon_40b": {
        "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_kv_heads": 8, "new_decoder_architecture": True,
    },
    "falcon_one_after_the_other": {
        "model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32, "parallel_attn": False,
        "multi_query": False, "bias": True,
    },
    "glm4_5_air": {
        "model_type": "glm4_moe", "head_dim": 128, "attention_bias": True, "num_nextn_predict_layers": 1,
    },
    "glm4_5": {
        "model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92, "head_dim": 128,
        "use_qk_norm": True, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "first_k_dense_replace": 3, "attention_bias": True,
    },
}  # fmt: skip

SIGLIP_400M: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 896, "vision_use_head": False,
}  # fmt: skip
CLIP_L: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 336, "projection_dim": 768,
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "in_chans": 3, "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
}  # fmt: skip
QWEN3_TOWER: dict[str, Any] = {
    "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
    "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17],
}
PIXTRAL: dict[str, Any] = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}
QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip

TOWERS: dict[str, tuple[dict[str, Any], str, int]] = {
    "vit_b": ({"model_type": "vit"}, "ViTModel", 0),
    "vit_without_bias": ({"model_type": "vit", "qkv_bias": False}, "ViTModel", 0),
    "siglip": (SIGLIP_400M, "SiglipVisionModel", 0),
    "siglip_384": ({**SIGLIP_400M, "image_size": 384}, "SiglipVisionModel", 0),
    "siglip_pooled": ({"model_type": "siglip_vision_model"}, "SiglipVisionModel", 0),
    "clip": (CLIP_L, "CLIPVisionModel", 0),
    "dinov2_l": (
        {"model_type": "dinov2", "hidden_size": 1024, "num_attention_heads": 16, "image_size": 518},
        "Dinov2Model", 1024,
    ),
    "dinov2_swiglu": ({"model_type": "dinov2", "use_swiglu_ffn": True}, "Dinov2Model", 768),
    "dinov2_registers": ({"model_type": "dinov2_with_registers"}, "Dinov2WithRegistersModel", 768),
}  # fmt: skip
JOINED: dict[str, dict[str, Any]] = {
    "llava_1_5": {"model_type": "llava", "vision_config": CLIP_L, "text_config": {"vocab_size": 32064}},
    "gemma3_4b": {
        "model_type": "gemma3", "vision_config": SIGLIP_400M,
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                        "num_hidden_layers": 34},
    },
    "qwen2_5_vl_7b": {
        "model_type": "qwen2_5_vl", "vision_config": QWEN_TOWER,
        "text_config": {**QWEN_TEXT, "model_type": "qwen2_5_vl_text"},
    },
    "qwen2_vl_2b": {
        "model_type": "qwen2_vl",
        "vision_config": {"model_type": "qwen2_vl", "hidden_size": 1536},
        "text_config": {
            "model_type": "qwen2_vl_text", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        },
    },
    "paligemma_3b": {
        "model_type": "paligemma", "vision_config": {**SIGLIP_400M, "image_size": 224},
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
            "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 257216,
        },
    },
    "qwen3_vl_4b": {
        "model_type": "qwen3_vl", "vision_config": QWEN3_TOWER, "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
    },
    "qwen3_vl_30b_a3b": {
        "model_type": "qwen3_vl_moe",
        "vision_config": {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
        "text_config": {
            "model_type": "qwen3_vl_moe_text", "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "tie_word_embeddings": False,
        },
    },
    "mistral_small_3_1": {
        "model_type": "mistral3", "vision_config": PIXTRAL, "tie_word_embeddings": False,
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "head_dim": 128, "vocab_size": 131072, "sliding_window": None,
        },
    },
    "pixtral_12b": {
        "model_type": "llava", "vision_config": PIXTRAL, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128,
            "vocab_size": 131072, "sliding_window": None,
        },
    },
    "idefics3_8b": {
        "model_type": "idefics3",
        "vision_config": {"intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14, "image_size": 364},
        "text_config": {**CAUSAL["llama3_8b"], "vocab_size": 128259},
    },
    "smolvlm_500m": {
        "model_type": "smolvlm", "scale_factor": 4,
        "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "image_size": 512},
        "text_config": {
            "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15,
            "num_key_value_heads": 5, "vocab_size": 49280,
        },
    },
    "llama4_scout": {
        "model_type": "llama4", "text_config": {"model_type": "llama4_text"},
        "vision_config": {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336},
    },
    "llava_1_6_7b": {"model_type": "llava_next", "vision_config": CLIP_L, "text_config": {"vocab_size": 32064}},
    "llava_onevision_7b": {
        "model_type": "llava_onevision",
        "vision_config": {**SIGLIP_400M, "image_size": 384, "num_hidden_layers": 26},
        "text_config": {"model_type": "qwen2", **QWEN_TEXT},
    },
    "internvl3_1b": {
        "model_type": "internvl", "vision_config": {"model_type": "internvl_vision", "attention_bias": True},
        "text_config": {**CAUSAL["qwen2_5_0_5b"], "vocab_size": 151674},
    },
}  # fmt: skip
JOINED_CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
}
NEWLINE = {"llava_1_6_7b": 4096, "llava_onevision_7b": 3584}
"""Width of the vector that the import says is left out."""


def imported(config: dict[str, Any], folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    text = import_hf(str(folder), "tested").files["conf/model/tested.yaml"]
    return Model.model_validate(yaml.safe_load(text))


def counted(config: dict[str, Any], folder: Path) -> int:
    return sum(params(component) for component in imported(config, folder).components.values())


def built(kind: Any, config: dict[str, Any], **more: Any) -> int:
    own = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return sum(p.numel() for p in kind(own, **more).parameters())


@pytest.mark.parametrize("name", CAUSAL)
def test_language_models(name: str, tmp_path: Path) -> None:
    config = CAUSAL[name]
    own = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(own)
    assert counted(config, tmp_path) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", TOWERS)
def test_towers(name: str, tmp_path: Path) -> None:
    """Without an image classifier's pooler, and without the mask token, which the import says is left out."""
    config, kind, mask_token = TOWERS[name]
    more = {"add_pooling_layer": False} if kind == "ViTModel" else {}
    assert counted(config, tmp_path) == built(getattr(transformers, kind), config, **more) - mask_token


@pytest.mark.parametrize("name", JOINED)
def test_vision_language_models(name: str, tmp_path: Path) -> None:
    config = JOINED[name]
    kind = getattr(transformers, JOINED_CLASSES[config["model_type"]])
    assert counted(config, tmp_path) == built(kind, config) - NEWLINE.get(name, 0)


def test_qwen2_5_vl_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    """The language model's keys stand at the top, the tower has the whole model's model_type."""
    flat = {"model_type": "qwen2_5_vl", "vision_config": QWEN_TOWER, **QWEN_TEXT}
    assert imported(flat, tmp_path) == imported(JOINED["qwen2_5_vl_7b"], tmp_path)


def test_internvl_under_the_keys_of_its_own_code(tmp_path: Path) -> None:
    text = {**CAUSAL["qwen2_5_0_5b"], "vocab_size": 151674, "tie_word_embeddings": False}
    tower = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    stated = {"qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm", "image_size": 448}
    own = {"model_type": "internvl_chat", "vision_config": {**tower, **stated}, "llm_config": text}
    same = {**JOINED["internvl3_1b"], "text_config": text, "tie_word_embeddings": False}
    assert imported(own, tmp_path).components == imported(same, tmp_path).components


def test_a_written_configuration_is_read_back(tmp_path: Path) -> None:
    """As save_pretrained of the installed version writes it, with rope_parameters and layer_types."""
    transformers.Gemma3TextConfig(num_hidden_layers=7).save_pretrained(tmp_path)
    model = import_hf(str(tmp_path), "tested")
    assert [note.key for note in model.notes if note.key == "layer_types"] == []
    decoder = yaml.safe_load(model.files["conf/model/tested.yaml"])["components"]["llm"]
    assert (decoder["layers"], decoder["rope_theta"], decoder["window"]["full_every"]) == (7, 1e6, 6)


OWN_CODE = {"internvl_chat", "intern_vit_6b", "kimi_k2"}
"""Kinds whose classes come with the model's repository."""


@pytest.mark.parametrize("kind", sorted(set(class_defaults()) - OWN_CODE))
def test_what_a_class_fills_in(kind: str) -> None:
    """The table of defaults against the classes of the installed version."""
    if kind.endswith("_vision"):
        config = transformers.AutoConfig.for_model(kind.removesuffix("_vision")).vision_config
    else:
        config = transformers.AutoConfig.for_model(kind)
    own = type(config)
    for key, value in class_defaults()[kind].items():
        if key == "rope_theta":
            theta = own.default_theta
            assert value == (theta["global"] if isinstance(theta, dict) else theta), key
        else:
            default = getattr(own, key)
            assert value == (list(default) if isinstance(default, tuple) else default), key
