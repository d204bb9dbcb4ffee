"""What DeepSpeed makes of each model of transformers: `python -m tests.real.transformers_models [TYPE ...]`.

Prints dslaunch/rules/deepspeed/transformers_models.json. Every model is built on torch's meta device from the
defaults of its configuration, so that nothing is downloaded and no weight takes memory; DeepSpeed's own code then
judges it. A model that can't be built this way is left out.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import warnings
from typing import Any

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


class _PerHead:
    """What deepspeed.set_optimizer_flags reads of a configuration."""

    optimizer_name = "muon"
    optimizer_params = {"per_head_muon": True}


def main(names: list[str]) -> None:
    os.environ.update(_ENVIRONMENT)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import deepspeed
    import transformers

    found = {name: facts(name) for name in names or sorted(model_classes())}
    rows = {name: row for name, row in found.items() if row is not None}
    heads = {"deepspeed": deepspeed.__version__, "transformers": transformers.__version__}
    lines = (f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows.items())
    print("{" + ",\n".join([json.dumps(heads)[1:-1], ' "models": {\n' + ",\n".join(lines) + "\n }}"]))


def model_classes() -> dict[str, str]:
    """The class that trains each model type: a language model, alone, behind an encoder, or behind an image."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        for name, classes in mapping.items():
            found.setdefault(name, classes if isinstance(classes, str) else classes[0])
    return found


def facts(name: str) -> dict[str, Any] | None:
    """The row of one model type; None where its defaults make no model."""
    import torch
    import transformers

    class_name = model_classes()[name]
    try:
        with torch.device("meta"):
            model = getattr(transformers, class_name)(transformers.AutoConfig.for_model(name))
    # A configuration whose defaults don't fit together raises whatever the model meets first.
    except Exception:
        return None
    classes = {type(each) for each in model.modules()}
    own = "transformers.models."
    return {
        "autotp": autotp(model),
        "class": class_name,
        "classes": sorted(each.__name__ for each in classes if each.__module__.startswith(own)),
        "heads": has_heads(model),
        "hybrid": not classes.isdisjoint(hybrid_layers()),
    }


def autotp(model: Any) -> str:
    """How AutoTP cuts the model: `plan`, `names`, or `refused`: engine.py _apply_autotp_partitioning 0.19.8."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plan = _get_hf_tp_plan(model)
    try:
        if plan and TPPlanConverter.convert(plan):
            return "plan"
        return "names" if AutoTP.tp_parser(model) else "refused"
    except (AssertionError, ValueError, TypeError):
        return "refused"


def has_heads(model: Any) -> bool | None:
    """Whether per_head_muon finds projections that it can cut by heads; None where the defaults don't tell."""
    import deepspeed

    try:
        deepspeed.set_optimizer_flags(_PerHead, model)
    # A configuration that differs by layer raises an error of transformers' own here.
    except Exception as error:
        return False if "per_head_muon" in str(error) else None
    return True


def hybrid_layers() -> set[Any]:
    """The layers that the hybrid engine speeds up: hybrid_engine.py populate_all_inference_policies 0.19.8."""
    from deepspeed.module_inject.containers.opt import HFOPTLayerPolicy
    from deepspeed.module_inject.replace_policy import replace_policies

    found: set[Any] = set()
    for policy in replace_policies:
        policy(None)
        layers = policy._orig_layer_class
        if policy is HFOPTLayerPolicy and layers is not None:
            parameters = inspect.signature(layers.forward).parameters
            if "cache_position" in parameters or "past_key_values" in parameters:
                continue
        found |= set(layers) if isinstance(layers, list) else {layers}
    return found - {None}


if __name__ == "__main__":
    main(sys.argv[1:])
