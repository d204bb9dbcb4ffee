"""Vision-language models of transformers: a tower, a projector and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_fields import Fields, refuse_unknown
from dslaunch.importing.hf_text import DECODERS, decoder
from dslaunch.importing.hf_vision import TOWERS, tower
from dslaunch.importing.imported import Note

Keys = dict[str, Any]

_TEXT_KINDS = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "gemma3": "gemma3_text",
    "llava": "llama",
    "internvl": "qwen2",
    "internvl_chat": "llama",
    "paligemma": "gemma",
    "qwen2_vl": "qwen2_vl_text",
}
"""The language model's kind where the section names none, as transformers fills it in."""
_VISION_KINDS = {
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "gemma3": "siglip_vision_model",
    "llava": "clip_vision_model",
    "internvl": "internvl_vision",
    "internvl_chat": "intern_vit_6b",
    "paligemma": "siglip_vision_model",
    "qwen2_vl": "qwen2_vl_vision",
}
_OF_LANGUAGE = {"internvl_chat": "llm_config"}
"""The language model's section, where it is not text_config."""
_FLAT = ("qwen2_5_vl", "qwen2_vl")
"""Kinds whose files of transformers 4 have the language model's keys at the top."""


def vision_language(config: Mapping[str, Any], kind: str) -> tuple[Keys, tuple[Note, ...]]:
    """The model's components and edges, and the notes of its three sections."""
    top = Fields(config, kind)
    vision = _section(config, "vision_config", _VISION_KINDS[kind], tuple(TOWERS))
    text = _text_section(config, kind)
    eyes, language = tower(vision), decoder(text)
    tied = top.get("tie_word_embeddings") or (
        "tie_word_embeddings" not in config and language.get("tied_embeddings")
    )
    language.pop("tied_embeddings", None)
    if tied:
        language["tied_embeddings"] = True
    projector, edges = JOINS[kind](top, vision, eyes, language)
    model = {"components": {"vision_encoder": eyes, "projector": projector, "llm": language}, "edges": edges}
    top.get("vision_config", _OF_LANGUAGE.get(kind, "text_config"))
    if kind in _FLAT and "text_config" not in config:
        top.get(*config)
    return model, (*top.finish(), *vision.finish(), *text.finish())


def _section(config: Mapping[str, Any], name: str, fallback: str, known: tuple[str, ...]) -> Fields:
    values = config.get(name)
    if values is None and "mm_vision_tower" in config:
        raise ConfigError(
            f"mm_vision_tower is {config['mm_vision_tower']!r}: a file of LLaVA's own code, which names its tower "
            "and does not describe it. Take the same model's config.json for transformers (llava-hf/...)"
        )
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{name} is missing: a {config['model_type']} configuration has one. Give the whole file."
        )
    kind = values.get("model_type", fallback)
    if f"{kind}_vision" == fallback:
        kind = fallback
    refuse_unknown(kind, f"{name}.", known)
    return Fields(values, kind, f"{name}.")


def _text_section(config: Mapping[str, Any], kind: str) -> Fields:
    fallback = _TEXT_KINDS[kind]
    if kind in _FLAT and "text_config" not in config:
        return Fields({k: v for k, v in config.items() if k != "vision_config"}, fallback)
    return _section(config, _OF_LANGUAGE.get(kind, "text_config"), fallback, tuple(DECODERS))


def _edges(tokens_in: int, tokens_out: int, from_layer: int = -1) -> list[Keys]:
    first: Keys = {"from": "vision_encoder", "to": "projector", "tokens": tokens_in, "join": "sequence"}
    if from_layer != -1:
        first["from_layer"] = from_layer
    return [first, {"from": "projector", "to": "llm", "tokens": tokens_out, "join": "sequence"}]


def _patches(eyes: Keys) -> int:
    side: int = eyes["image"] // eyes["patch"]
    return side * side


def _llava(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """Two linear layers on each patch of the tower's last block but one."""
    taken = top.layers("vision_feature_layer")
    projector: Keys = {
        "arch": "mlp",
        "dims": [eyes["hidden"] * len(taken), language["hidden"], language["hidden"]],
    }
    if not top.get("multimodal_projector_bias"):
        projector["bias"] = False
    if len(taken) > 1:
        top.note("vision_feature_layer", f"{taken} are joined by channel; the edge names the last of them")
    top.get("image_seq_length")
    with_class = top.get("vision_feature_select_strategy") == "full" and bool(eyes.get("class_token"))
    tokens = _patches(eyes) + with_class
    return projector, _edges(tokens, tokens, taken[-1])


def _gemma3(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """Patches are averaged to mm_tokens_per_image, then a norm and one matrix."""
    tokens = top.number("mm_tokens_per_image")
    projector = {
        "arch": "mlp",
        "dims": [eyes["hidden"], language["hidden"]],
        "bias": False,
        "norm": True,
        "norm_kind": "rmsnorm",
        "tokens": tokens,
    }
    return projector, _edges(_patches(eyes), tokens)


def _qwen2_5_vl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """The tower's patch merger: 2 x 2 patches become one token."""
    merge = vision.number("spatial_merge_size") ** 2
    wide = eyes["hidden"] * merge
    projector = {
        "arch": "mlp",
        "dims": [wide, wide, vision.number("out_hidden_size")],
        "merge": merge,
        "norm": True,
        "norm_kind": "rmsnorm",
        "norm_before_merge": True,
    }
    return projector, _edges(_patches(eyes), _patches(eyes) // merge)


def _qwen2_vl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """As Qwen2.5-VL's, with a layer norm, and the language model's width as the tower's hidden_size."""
    merge = vision.number("spatial_merge_size") ** 2
    wide = eyes["hidden"] * merge
    projector = {
        "arch": "mlp",
        "dims": [wide, wide, vision.number("hidden_size")],
        "merge": merge,
        "norm": True,
        "norm_before_merge": True,
    }
    return projector, _edges(_patches(eyes), _patches(eyes) // merge)


def _paligemma(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """One linear layer on each patch."""
    projector = {"arch": "mlp", "dims": [eyes["hidden"], top.number("projection_dim")]}
    return projector, _edges(_patches(eyes), _patches(eyes))


def _internvl_chat(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    """The same model as transformers' InternVL, under the keys of its own code."""
    if top.get("force_image_size"):
        eyes["image"] = top.number("force_image_size")
    return _shuffled(top, eyes, language, top.layers("select_layer")[-1])


def _internvl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> tuple[Keys, list[Keys]]:
    return _shuffled(top, eyes, language, top.layers("vision_feature_layer")[-1])


def _shuffled(top: Fields, eyes: Keys, language: Keys, layer: int) -> tuple[Keys, list[Keys]]:
    """Pixel shuffle, a norm, and two linear layers."""
    ratio = top.real("downsample_ratio")
    if not 0 < ratio <= 1:
        raise ConfigError(f"downsample_ratio is {ratio}: more than 0 and at most 1 belongs there")
    merge = int(1 / ratio) ** 2
    top.get("image_seq_length")
    projector = {
        "arch": "mlp",
        "dims": [eyes["hidden"] * merge, language["hidden"], language["hidden"]],
        "merge": merge,
        "norm": True,
    }
    return projector, _edges(_patches(eyes), _patches(eyes) // merge, layer)


JOINS: dict[str, Callable[[Fields, Fields, Keys, Keys], tuple[Keys, list[Keys]]]] = {
    "gemma3": _gemma3,
    "internvl": _internvl,
    "internvl_chat": _internvl_chat,
    "llava": _llava,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
}
