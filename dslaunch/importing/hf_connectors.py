"""What stands between a tower and a language model of transformers: connectors and edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_fields import Fields

Keys = dict[str, Any]
Joined = tuple[dict[str, Keys], list[Keys]]
"""What stands between tower and language model, by name, and the edges."""


def _edges(tokens_in: int, tokens_out: int, from_layer: int = -1) -> list[Keys]:
    first: Keys = {"from": "vision_encoder", "to": "projector", "tokens": tokens_in, "join": "sequence"}
    if from_layer != -1:
        first["from_layer"] = from_layer
    return [first, {"from": "projector", "to": "llm", "tokens": tokens_out, "join": "sequence"}]


def _patches(eyes: Keys) -> int:
    side: int = eyes["image"] // eyes["patch"]
    return side * side


def _llava(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
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
    return {"projector": projector}, _edges(tokens, tokens, taken[-1])


def _gemma3(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
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
    return {"projector": projector}, _edges(_patches(eyes), tokens)


def _qwen2_5_vl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
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
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge)


def _qwen2_vl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
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
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge)


def _paligemma(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """One linear layer on each patch."""
    projector = {"arch": "mlp", "dims": [eyes["hidden"], top.number("projection_dim")]}
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes))


def _internvl_chat(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """The same model as transformers' InternVL, under the keys of its own code."""
    if top.get("force_image_size"):
        eyes["image"] = top.number("force_image_size")
    return _shuffled(top, eyes, language, top.layers("select_layer")[-1])


def _internvl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    return _shuffled(top, eyes, language, top.layers("vision_feature_layer")[-1])


def _shuffled(top: Fields, eyes: Keys, language: Keys, layer: int) -> Joined:
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
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge, layer)


def _qwen3_vl(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """A merger after the tower, and one for each layer of DeepStack, whose tokens enter the first layers."""
    merge, patches = vision.number("spatial_merge_size") ** 2, _patches(eyes)
    wide = eyes["hidden"] * merge
    widths = [wide, wide, vision.number("out_hidden_size")]
    merger: Keys = {"arch": "mlp", "dims": widths, "merge": merge, "norm": True}
    connectors, edges = {"projector": merger | {"norm_before_merge": True}}, _edges(patches, patches // merge)
    for number, layer in enumerate(vision.layers("deepstack_visual_indexes")):
        name, tokens = f"deepstack_{layer}", patches // merge
        connectors[name] = merger
        edges += [
            {"from": "vision_encoder", "to": name, "tokens": patches, "join": "sequence", "from_layer": layer},
            {"from": name, "to": "llm", "tokens": tokens, "join": "add", "to_layers": [number]},
        ]
    return connectors, edges


def _mistral3(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """A norm, a merger of neighbouring patches, and two linear layers."""
    taken, merge = top.layers("vision_feature_layer"), top.number("spatial_merge_size") ** 2
    if top.get("multimodal_projector_bias") or len(taken) > 1:
        raise ConfigError(
            "multimodal_projector_bias or several of vision_feature_layer: of this projector the first matrix has "
            "no bias and reads one layer, and an MLP's matrices are alike in that"
        )
    projector = {
        "arch": "mlp",
        "dims": [eyes["hidden"] * merge, eyes["hidden"], language["hidden"], language["hidden"]],
        "merge": merge,
        "bias": False,
        "norm": True,
        "norm_kind": "rmsnorm",
        "norm_before_merge": True,
    }
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge, taken[-1])


def _idefics3(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """Pixel shuffle and one matrix."""
    merge = top.number("scale_factor") ** 2
    widths = [eyes["hidden"] * merge, language["hidden"]]
    projector = {"arch": "mlp", "dims": widths, "merge": merge, "bias": False}
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge)


def _llama4(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """Pixel shuffle and two matrices in the tower, and one after it."""
    ratio = vision.real("pixel_shuffle_ratio")
    merge = round(1 / ratio) ** 2 if 0 < ratio <= 1 else 0
    ends = [vision.number(f"projector_{end}_dim") for end in ("input", "output")]
    widths = [eyes["hidden"] * merge, *ends, vision.number("vision_output_dim")]
    if eyes["ffn"] != widths[0] or len(set(widths[1:])) > 1:
        raise ConfigError(
            f"vision_config: pixel_shuffle_ratio {ratio:g}, intermediate_size {eyes['ffn']}, projector_input_dim, "
            f"projector_output_dim, vision_output_dim {widths[1:]}: the last three are equal, and the second is "
            f"hidden_size / pixel_shuffle_ratio**2 = {widths[0]}"
        )
    projector = {"arch": "mlp", "dims": [*widths[:3], language["hidden"]], "merge": merge, "bias": False}
    return {"projector": projector}, _edges(_patches(eyes), _patches(eyes) // merge)


def _tiled(top: Fields, vision: Fields, eyes: Keys, language: Keys) -> Joined:
    """LLaVA's projector; a large image is cut into tiles, rows of which end with a learnt vector."""
    top.note("image_newline", "the vector of the language model's width that ends a row of tiles is left out")
    top.note("image_grid_pinpoints", "the edges have the tokens of one tile; an image may have several")
    return _llava(top, vision, eyes, language)


JOINS: dict[str, Callable[[Fields, Fields, Keys, Keys], Joined]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "internvl_chat": _internvl_chat,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": _tiled,
    "llava_onevision": _tiled,
    "mistral3": _mistral3,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "smolvlm": _idefics3,
}
