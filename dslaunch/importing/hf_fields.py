"""A configuration of transformers, read key by key: what is absent takes its class's default."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.importing.hf_refused import UNDESCRIBED
from dslaunch.importing.imported import Note

_WITHOUT_BEARING = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "auto_map",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype",
    "eoi_token_index", "boi_token_index", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "hidden_act", "hidden_activation", "id2label", "ignore_index", "image_token_id", "image_token_index",
    "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
    "layer_norm_eps", "max_length", "model_type", "out_features", "out_indices", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pooler_act", "pooler_output_size",
    "pretraining_tp", "problem_type", "projector_hidden_act", "reshape_hidden_states", "return_dict",
    "stage_names", "tokenizer_class", "tokens_per_second", "torch_dtype", "transformers_version", "use_cache",
    "vision_end_token_id", "vision_start_token_id", "vision_token_id", "video_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx",
    "task_specific_params", "activation_function", "scale_attn_weights", "encoder_stride", "apply_layernorm",
    "layer_scale_init_value", "layerscale_value", "fullatt_block_indexes", "spatial_patch_size",
    "eoi_token_id", "boi_token_id", "cache_implementation", "unsloth_fixed", "use_return_dict", "torchscript",
    "projection_dim", "vocab_size", "min_length", "top_k", "top_p", "temperature",
    "vision_feature_select_strategy", "num_image_tokens", "original_max_position_embeddings", "template",
    "ps_version", "dynamic_image_size", "min_dynamic_patch", "max_dynamic_patch", "use_thumbnail",
    "use_flash_attn", "_commit_hash",
})  # fmt: skip
"""Keys that change neither sizes nor arithmetic of a training step: tokens, files, generation, activations."""

_REASONS = {
    "rope_scaling": "positions are scaled at run time; sizes and FLOPs stay the same, and the program keeps it",
    "attn_logit_softcapping": "no parameters; the program keeps it",
    "final_logit_softcapping": "no parameters; the program keeps it",
    "query_pre_attn_scalar": "a scale; no parameters",
    "partial_rotary_factor": "part of a head without positions; sizes stay the same",
    "quantization_config": "training starts from plain weights; dequantise them first",
    "router_aux_loss_coef": "a loss of the program",
    "layer_types": "the layers' windows are not as regular as `window` can say",
    "num_nextn_predict_layers": (
        "transformers builds no layers for multi-token prediction; set mtp_layers in the model file to train them"
    ),
    "use_mask_token": "the mask token, one vector of hidden width, is left out: only masked pretraining uses it",
}
_OWN_WORDS = "no key of dslaunch stands for it; the program keeps it"


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, dict[str, Any]]:
    """By model_type: what a configuration class fills in (transformers 5.24.0, models/*/configuration_*.py)."""
    text = (
        resources.files("dslaunch.importing").joinpath("data", "hf_defaults.json").read_text(encoding="utf-8")
    )
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


class Fields:
    """One section of a configuration; remembers what was read, so that the rest can be told."""

    def __init__(self, values: Mapping[str, Any], kind: str, where: str = "") -> None:
        self.values, self.kind, self.where = values, kind, where
        self._defaults = class_defaults()[kind]
        self._read: set[str] = set()
        self.notes: list[Note] = []

    def get(self, *names: str) -> Any:
        """The value of the first name that stands in the file, else the class's default; None where neither."""
        self._read.update(names)
        for name in names:
            if name in self.values:
                return self.values[name]
        return next((self._defaults[name] for name in names if name in self._defaults), None)

    def number(self, *names: str) -> int:
        """A whole number that has to be there.

        Raises:
            ConfigError: absent, or not a whole number above 0.
        """
        value = self.get(*names)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.where}{names[0]} is {value!r}: a whole number of 1 or more belongs here"
            )
        return value

    def count(self, *names: str) -> int:
        """A whole number of 0 or more; 0 where it is absent or null. Raises ConfigError where it is none."""
        return 0 if self.get(*names) in (None, 0) else self.number(*names)

    def real(self, *names: str) -> float:
        """A number that has to be there; raises ConfigError where it is none."""
        return self._finite(names[0], self.get(*names))

    def layers(self, name: str) -> list[int]:
        """One layer's number, or several; raises ConfigError where they are none."""
        value = self.get(name)
        found = value if isinstance(value, list) else [value]
        if not found or any(type(layer) is not int for layer in found):
            raise ConfigError(
                f"{self.where}{name} is {value!r}: a layer's number belongs here, or a list of them"
            )
        return found

    def rope_theta(self) -> float:
        """From rope_theta (transformers 4), or rope_parameters (5); of full attention where there are two."""
        given = self.get("rope_parameters") or {}
        if isinstance(given, Mapping) and "full_attention" in given:
            given = given["full_attention"]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{self.where}rope_parameters is {given!r}: a section with keys of its own belongs here"
            )
        if given.get("rope_type", "default") != "default":
            self.note("rope_scaling")
        by_class = self.get("rope_theta")
        return self._finite(
            "rope_theta", self.values.get("rope_theta") or given.get("rope_theta") or by_class
        )

    def _finite(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.where}{name} is {value!r}: a number belongs here")
        return float(value)

    def note(self, key: str, reason: str = "") -> None:
        """Something that is not carried over."""
        self._read.add(key)
        self.notes.append(Note(f"{self.where}{key}", reason or _REASONS.get(key, _OWN_WORDS)))

    def finish(self) -> tuple[Note, ...]:
        """The notes, one for each key that nobody read and that says something among them."""
        for key, value in self.values.items():
            if key not in self._read | _WITHOUT_BEARING and value not in (None, False, 0, "", [], {}):
                self.note(key)
        return tuple(self.notes)


def refuse_unknown(kind: object, where: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError where `kind` is none of `known`."""
    if isinstance(kind, str) and kind in UNDESCRIBED:
        raise ConfigError(
            f"{where}model_type is {kind!r}, which a model file cannot describe: {UNDESCRIBED[kind]}. For a "
            "plan that comes near, write the nearest architecture into conf/model/NAME.yaml; `dslaunch schema "
            "model.components` lists the keys."
        )
    if kind not in known:
        raise ConfigError(
            f"{where}model_type is {kind!r}: no rule is known for it. Known are {listed(known)}."
            f"{nearest(str(kind), known)} Describe the model by hand in conf/model/NAME.yaml instead; "
            "`dslaunch schema model.components` lists the keys."
        )
