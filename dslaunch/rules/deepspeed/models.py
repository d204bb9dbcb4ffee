"""A DeepSpeed JSON against the model that it is for: what DeepSpeed looks for in the model, and doesn't find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

from dslaunch.errors import listed
from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import ZERO, Config, configs
from dslaunch.rules.deepspeed.model import Model, known_models, model_of
from dslaunch.rules.registry import Check, Hit, RaisedBy, Severity, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.topology import component

_TP = "tensor_parallel"
_LEAF = f"{ZERO}.leaf_module.classes"
_WITH = "transformers 5.24"
_PRESETS = frozenset({"mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"})
_LARGEST_LEAF = 1e9
"""Parameters above which a module is never made a leaf: parameter_offload.py Z3_MAX_LEAF_SIZE 0.19.8."""
_LLAMA_LIKE = {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 6}
"""Modules within an attention block: four projections, and in Qwen3 two norms."""

ModelCheck = Callable[[Config, Model], Iterator[Hit]]


def model_rule(
    rule_id: str, *, severity: Severity, evidence: str, raised_by: RaisedBy = "nobody", since: str = ""
) -> Callable[[ModelCheck], ModelCheck]:
    """Register a rule that looks at a DeepSpeed JSON whose model is known."""

    def register(check_model: ModelCheck) -> ModelCheck:
        def check(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
            for config in configs(plan, files, settings):
                known = model_of(config, files)
                if known is not None:
                    yield from check_model(config, known)

        check.__doc__ = check_model.__doc__
        registered: Check = check
        rule(
            rule_id, severity=severity, raised_by=raised_by, since=since,
            evidence=f"deepspeedai/DeepSpeed:{evidence}",
        )(registered)  # fmt: skip
        return check_model

    return register


@model_rule(
    "autotp.model", severity="error", raised_by="deepspeed.initialize",
    evidence=f"deepspeed/runtime/engine.py, module_inject/auto_tp.py AutoTP.tp_parser 0.19.8, run with {_WITH}",
)  # fmt: skip
def autotp_model(config: Config, model: Model) -> Iterator[Hit]:
    """AutoTP on a model that DeepSpeed doesn't know how to cut."""
    size, known = config.number(f"{_TP}.autotp_size"), model.alone
    told = any(config.get(f"{_TP}.{name}") for name in ("partition_config", "preset_model"))
    if size is not None and size > 1 and not told and known is not None and known.autotp == "refused":
        message = (
            f"{model.said()}, which AutoTP can't cut by itself: {_WITH} has no tensor-parallel plan for it that "
            "DeepSpeed takes: deepspeed.initialize raises."
        )
        fix = "Give tensor_parallel.partition_config with the layers to cut, or leave AutoTP out."
        yield config.hit(f"{_TP}.autotp_size", message, fix)


@model_rule("autotp.heads", severity="slow", evidence=f"deepspeed/module_inject/auto_tp.py 0.19.8; {_WITH}")
def autotp_heads(config: Config, model: Model) -> Iterator[Hit]:
    """AutoTP over more ranks than the model has key-value heads."""
    size = config.number(f"{_TP}.autotp_size")
    heads = model.number("num_key_value_heads")
    if size is not None and heads and size > heads:
        message = (
            f"{model.source} has {heads} key-value heads for {size:g} ranks: those beyond hold no attention, and "
            "wait for the rest."
        )
        yield config.hit(f"{_TP}.autotp_size", message, f"Use at most {heads}.")


@model_rule(
    "experts.model", severity="wrong", since="0.19.2",
    evidence="deepspeed/module_inject/auto_ep.py AutoEP.ep_parser 0.19.8, run",
)  # fmt: skip
def experts_model(config: Config, model: Model) -> Iterator[Hit]:
    """expert_parallel on a model without experts."""
    if config.get("expert_parallel.enabled") is not True or model.experts != 0:
        return
    by_name = {config.get("expert_parallel.preset_model"), *model.types} & _PRESETS
    if by_name or config.get("expert_parallel.moe_layer_pattern"):
        message = f"{model.said()}, with no experts: DeepSpeed raises ValueError, no MoE layers detected."
        yield config.hit(
            "expert_parallel.enabled", message, "Write false.", severity="error", raised_by="deepspeed.initialize"
        )
        return
    message = f"{model.said()}, with no experts: DeepSpeed warns that it found none, and nothing is cut."
    yield config.hit("expert_parallel.enabled", message, "Write false, or name the model's MoE layers.")


@model_rule("hybrid.model", severity="slow", evidence="deepspeed/runtime/hybrid_engine.py 0.19.8, run")
def hybrid_model(config: Config, model: Model) -> Iterator[Hit]:
    """The hybrid engine for a model that it has no fast layers for."""
    if config.on("hybrid_engine.enabled") and model.parts and not any(part.hybrid for part in model.parts):
        message = (
            f"{model.said()}, for which the hybrid engine has no fast layers in {_WITH}: it warns, and generates "
            "as the model does by itself."
        )
        yield config.hit("hybrid_engine.enabled", message, "Write false, or generate with an inference engine.")


@model_rule(
    "optimizer.muon-heads", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/__init__.py _report_per_head_tagging 0.19.8, run",
)  # fmt: skip
def muon_heads(config: Config, model: Model) -> Iterator[Hit]:
    """per_head_muon on a model whose attention has no projections by heads."""
    known = model.alone
    asked = config.optimizer == "muon" and config.get("optimizer.params.per_head_muon") is True
    if asked and known is not None and known.heads is False:
        message = f"{model.said()}, whose attention has no projection that Muon can cut by heads: ValueError."
        yield config.hit("optimizer.params.per_head_muon", message, "Leave per_head_muon out.")


@model_rule(
    "zero.leaf-class", severity="hang", since="0.18.0",
    evidence="deepspeed/utils/z3_leaf_module.py apply_zero_leaf_module_config 0.19.8, run",
)  # fmt: skip
def leaf_class(config: Config, model: Model) -> Iterator[Hit]:
    """A class of leaf modules that the model has none of."""
    given = config.get(_LEAF)
    classes = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    own = frozenset(name for part in model.parts for name in part.classes)
    if config.stage != 3 or not own:
        return
    names = [str(name).rpartition(".")[2] for name in classes]
    others = [name for name in names if any(name in each.classes for each in known_models().values())]
    if names and others == names and own.isdisjoint(names):
        message = (
            f"{model.said()}, which has no {listed(names)}: no module becomes a leaf, and DeepSpeed only warns. "
            "Experts that aren't called in the same order on every rank then wait for each other."
        )
        yield config.hit(_LEAF, message, _leaf_fix(own))


def _leaf_fix(own: frozenset[str]) -> str:
    blocks = sorted(name for name in own if name.endswith(("MoeBlock", "MoE", "Moe")))
    return f"Name {blocks[0]}." if blocks else "Name a class of this model, or leave leaf_module out."


@model_rule(
    "zero.granularity", severity="info",
    evidence="deepspeed/runtime/zero/parameter_offload.py _set_z3_leaf_modules_by_threshold 0.19.8, run",
)  # fmt: skip
def granularity(config: Config, model: Model) -> Iterator[Hit]:
    """A stage3_module_granularity_threshold below the model's smallest module, which changes nothing."""
    key = next((key for key in _GRANULARITY if config.number(key)), None)
    smallest = _smallest_module(model)
    if key is None or smallest is None or config.stage != 3:
        return
    threshold = config.number(key) or 0
    if 0 < threshold < smallest:
        message = (
            f"{threshold:,.0f} is below the smallest figure of a module, {smallest:,} (by "
            f"{model.source}): no module becomes a leaf."
        )
        yield config.hit(key, message, f"Write {smallest:,} or more without the commas, or leave it out.")


_GRANULARITY = (f"{ZERO}.stage3_module_granularity_threshold", f"{ZERO}.module_granularity_threshold")


def _smallest_module(model: Model) -> int | None:
    """The least of any module's parameters over the modules in it, itself among them, that hold weights.

    None for what is no dense Llama-like model.
    """
    leaves = _LLAMA_LIKE.get(model.types[0]) if len(model.types) == 1 and len(model.shapes) == 1 else None
    if leaves is None:
        return None
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "vocab_size")
    hidden, heads, ffn, layers, vocab = (model.number(name) for name in names)
    if not (hidden and heads and ffn and layers and vocab):
        return None
    kv_heads, width = model.number("num_key_value_heads") or heads, model.number("head_dim") or hidden // heads
    attention = 2 * hidden * width * (heads + kv_heads)
    if model.types[0] == "qwen2":
        attention += width * (heads + 2 * kv_heads)
    if model.types[0] == "qwen3":
        attention += 2 * width
    mlp, embedding = 3 * hidden * ffn, vocab * hidden
    block = attention + mlp + 2 * hidden
    body, counted = embedding + layers * block + hidden, layers * (leaves + 8) + 3
    modules = (
        (attention, leaves + 1), (mlp, 4), (block, leaves + 8), (body, counted), (body + embedding, counted + 2),
    )  # fmt: skip
    return min(size // count for size, count in modules if size <= _LARGEST_LEAF)


@model_rule(
    "zero.quantized-size", severity="error",
    evidence="deepspeed/runtime/zero/partition_parameters.py CUDAQuantizer.quantize 0.19.8, run",
)  # fmt: skip
def quantized_size(config: Config, model: Model) -> Iterator[Hit]:
    """zero_quantized_weights where a norm's share on a rank is no multiple of 8."""
    replicas = _replicas(config)
    if config.stage != 3 or not config.on(f"{ZERO}.zero_quantized_weights") or replicas is None:
        return
    for width in model.hidden:
        share = ceil(width / replicas)
        if share % 8:
            message = (
                f"by {model.source} a norm has {width} weights: {share} on each of {replicas} ranks, and what is "
                "quantized must be a multiple of 8: AssertionError in the first forward pass."
            )
            fix = f"Use ranks of which each gets a multiple of 8 out of {width}, or leave it out."
            yield config.hit(f"{ZERO}.zero_quantized_weights", message, fix)


def _replicas(config: Config) -> int | None:
    """Ranks that a parameter is cut over."""
    if (config.number(f"{_TP}.autotp_size") or 1) > 1:
        return None
    if config.plan is None:
        return config.settings.data_parallel
    found = component(config.plan, config.file)
    return found[1].dp * found[1].cp if found else None
