"""Vision-language models of transformers: a tower, a projector and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_connectors import JOINS, Keys
from dslaunch.importing.hf_fields import Fields, refuse_unknown
from dslaunch.importing.hf_text import DECODERS, decoder
from dslaunch.importing.hf_vision import TOWERS, tower
from dslaunch.importing.imported import Note

_TEXT_KINDS = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "gemma3": "gemma3_text",
    "llava": "llama",
    "internvl": "qwen2",
    "internvl_chat": "llama",
    "paligemma": "gemma",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "mistral3": "mistral",
    "idefics3": "llama",
    "smolvlm": "llama",
    "llama4": "llama4_text",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
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
    "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision",
    "mistral3": "pixtral",
    "idefics3": "idefics3_vision",
    "smolvlm": "smolvlm_vision",
    "llama4": "llama4_vision_model",
    "llava_next": "clip_vision_model",
    "llava_onevision": "siglip_vision_model",
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
    connectors, edges = JOINS[kind](top, vision, eyes, language)
    model = {"components": {"vision_encoder": eyes, **connectors, "llm": language}, "edges": edges}
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
