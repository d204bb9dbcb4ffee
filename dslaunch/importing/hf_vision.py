"""Vision towers of transformers. Sizes as modeling_*.py of transformers 5.24.0 builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_fields import Fields

Keys = dict[str, Any]
DYNAMIC_IMAGE = 448
"""Side of the image, pixels, that stands in a model whose tower takes any."""


def tower(fields: Fields) -> Keys:
    """The component of a vision tower; `fields.kind` is one of TOWERS."""
    return {"arch": "vit", **TOWERS[fields.kind](fields)}


def _common(fields: Fields) -> Keys:
    return {
        "layers": fields.number("num_hidden_layers"),
        "hidden": fields.number("hidden_size"),
        "heads": fields.number("num_attention_heads"),
        "ffn": fields.number("intermediate_size"),
        **_image(fields),
    }


def _image(fields: Fields) -> Keys:
    """A convolution of stride `patch` leaves the rim of the image that is no whole patch (SigLIP: 384 / 14)."""
    patch, image = fields.number("patch_size"), fields.number("image_size")
    seen = image // patch * patch
    if seen not in (0, image):
        side = seen // patch
        fields.note(
            "image_size", f"{image} is no whole number of patches: {seen}, the {side} x {side} that it has"
        )
    keys = {"patch": patch, "image": seen or image}
    channels = fields.number("num_channels")
    return keys | ({"channels": channels} if channels != 3 else {})


def _vit(fields: Fields) -> Keys:
    """Without the pooler, which is an image classifier's."""
    bias = {} if fields.get("qkv_bias") else {"qkv_bias": False}
    return _common(fields) | {"class_token": True} | bias


def _siglip(fields: Fields) -> Keys:
    return _common(fields) | ({"attention_pooling": True} if fields.get("vision_use_head") else {})


def _clip(fields: Fields) -> Keys:
    return _common(fields) | {"class_token": True, "patch_bias": False, "pre_norm": True}


def _dinov2(fields: Fields) -> Keys:
    hidden, ratio = fields.number("hidden_size"), fields.real("mlp_ratio")
    width, gated = int(hidden * ratio), bool(fields.get("use_swiglu_ffn"))
    if gated:
        width = (int(width * 2 / 3) + 7) // 8 * 8
    if fields.get("use_mask_token") is not False:
        fields.note("use_mask_token")
    registers = fields.count("num_register_tokens")
    keys: Keys = {
        "layers": fields.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": fields.number("num_attention_heads"),
        "ffn": width,
        **_image(fields),
        "class_token": True,
        "layer_scale": True,
    }
    if gated:
        keys["gated_mlp"] = True
    if registers:
        # Its class token has a row of its own, which towers with registers have not in timm.
        rows = (keys["image"] // keys["patch"]) ** 2 + 1
        keys |= {"registers": registers, "position_rows": rows}
    return keys | ({} if fields.get("qkv_bias") else {"qkv_bias": False})


def _qwen2_5_vl(fields: Fields) -> Keys:
    """Any image size: positions are rotary, and attention runs in windows of window_size pixels."""
    layers, patch = fields.number("depth"), fields.number("patch_size")
    full = fields.get("fullatt_block_indexes")
    every = full[0] + 1 if isinstance(full, list) and full and type(full[0]) is int else 1
    if full != [i for i in range(layers) if (i + 1) % every == 0]:
        raise ConfigError(f"{fields.where}fullatt_block_indexes is {full}: every n-th layer is expected")
    _note_dynamic(fields)
    return {
        "layers": layers,
        "hidden": fields.number("hidden_size"),
        "heads": fields.number("num_heads"),
        "ffn": fields.number("intermediate_size"),
        "patch": patch,
        "image": DYNAMIC_IMAGE,
        "channels": fields.number("in_channels", "in_chans"),
        "temporal_patch": fields.number("temporal_patch_size"),
        "patch_bias": False,
        "position": "rope",
        "norm": "rmsnorm",
        "gated_mlp": True,
        "post_norm": False,
        "window": {"tokens": (fields.number("window_size") // patch) ** 2, "full_every": every},
    }


def _qwen2_vl(fields: Fields) -> Keys:
    """Any image size, and all patches see one another."""
    width = fields.number("embed_dim")
    _note_dynamic(fields)
    return {
        "layers": fields.number("depth"),
        "hidden": width,
        "heads": fields.number("num_heads"),
        "ffn": int(width * fields.real("mlp_ratio")),
        "patch": fields.number("patch_size"),
        "image": DYNAMIC_IMAGE,
        "channels": fields.number("in_channels", "in_chans"),
        "temporal_patch": fields.number("temporal_patch_size"),
        "patch_bias": False,
        "position": "rope",
        "post_norm": False,
    }


def _qwen3_vl(fields: Fields) -> Keys:
    """Any image size: a learnt table that is interpolated, and rotary positions besides."""
    _note_dynamic(fields)
    return {
        "layers": fields.number("depth"),
        "hidden": fields.number("hidden_size"),
        "heads": fields.number("num_heads"),
        "ffn": fields.number("intermediate_size"),
        "patch": fields.number("patch_size"),
        "image": DYNAMIC_IMAGE,
        "channels": fields.number("in_channels", "in_chans"),
        "temporal_patch": fields.number("temporal_patch_size"),
        "position_rows": fields.number("num_position_embeddings"),
        "post_norm": False,
    }


def _pixtral(fields: Fields) -> Keys:
    """Any image size, with rotary positions; no linear layer has a bias."""
    without = dict.fromkeys(("patch_bias", "qkv_bias", "out_bias", "mlp_bias", "post_norm"), False)
    return _common(fields) | without | {
        "position": "rope", "norm": "rmsnorm", "gated_mlp": True, "pre_norm": True,
    }  # fmt: skip


def _llama4(fields: Fields) -> Keys:
    fields.get("norm_eps", "multi_modal_projector_bias", "rope_theta")
    return _clip(fields)


def _note_dynamic(fields: Fields) -> None:
    fields.note(
        "image_size",
        f"the tower takes any; image: {DYNAMIC_IMAGE} stands in the model file, set your own there",
    )


def _intern_vit(fields: Fields) -> Keys:
    """InternViT with the code that comes with it (OpenGVLab/InternVL: internvl/model/internvl_chat, 2.5)."""
    _refuse_joint_norm(fields, "qk_normalization")
    keys = _common(fields) | {"class_token": True, "layer_scale": True, "post_norm": False}
    if fields.get("norm_type") == "rms_norm":
        keys["norm"] = "rmsnorm"
    return keys | ({} if fields.get("qkv_bias") else {"qkv_bias": False})


def _refuse_joint_norm(fields: Fields, key: str) -> None:
    if fields.get(key):
        raise ConfigError(
            f"{fields.where}{key} is true: this tower's norm runs over all heads together, which is not "
            "modelled (qk_norm is one per head)"
        )


def _internvl(fields: Fields) -> Keys:
    _refuse_joint_norm(fields, "use_qk_norm")
    keys = _common(fields) | {"class_token": True, "layer_scale": True}
    if fields.get("use_mask_token"):
        fields.note("use_mask_token")
    if not fields.get("use_absolute_position_embeddings"):
        raise ConfigError(
            f"{fields.where}use_absolute_position_embeddings is false: such a tower is not modelled"
        )
    if fields.get("norm_type") == "rms_norm":
        keys["norm"] = "rmsnorm"
    bias = {} if fields.get("attention_bias") else {"qkv_bias": False}
    return keys | bias | {"post_norm": not fields.get("use_mean_pooling")}


TOWERS: dict[str, Callable[[Fields], Keys]] = {
    "clip_vision_model": _clip,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "idefics3_vision": _common,
    "intern_vit_6b": _intern_vit,
    "internvl_vision": _internvl,
    "llama4_vision_model": _llama4,
    "pixtral": _pixtral,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen3_vl_moe_vision": _qwen3_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "siglip_vision_model": _siglip,
    "smolvlm_vision": _common,
    "vit": _vit,
}
