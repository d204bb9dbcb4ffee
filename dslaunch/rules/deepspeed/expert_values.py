"""Values of DeepSpeed's section expert_parallel (AutoEP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dslaunch.errors import listed
from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit

_EP = "expert_parallel"
_FOLD = "deepspeed/module_inject/auto_ep_config.py validate_autoep_config 0.19.8, run"
_CHOICES = {
    "preset_model": ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"),
    "score_apply": ("auto", "pre", "post"),
    "combine_impl": ("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": ("auto", "eager", "fused"),
    "gate_up_impl": ("separate", "fused"),
    "comm_backend": ("comm", "deepep"),
    "score_func": ("auto", "softmax", "sigmoid"),
}


@config_rule(
    "experts.values", severity="error", raised_by="deepspeed.initialize", since="0.19.2", evidence=_FOLD
)
def expert_values(config: Config) -> Iterator[Hit]:
    """Values of expert_parallel that DeepSpeed refuses once it is enabled."""
    if not config.get(f"{_EP}.enabled"):
        return
    for name, choices in _CHOICES.items():
        value = config.get(f"{_EP}.{name}")
        given = config.has(f"{_EP}.{name}") and not (value is None and name == "preset_model")
        if given and not (isinstance(value, str) and value in choices):
            message = f"{name} is {shown(value)}: DeepSpeed raises ValueError."
            yield config.hit(f"{_EP}.{name}", message, f"Use {listed(choices)}.")
    ours, other = config.get(f"{_EP}.preset_model"), config.get("tensor_parallel.preset_model")
    if ours in _CHOICES["preset_model"] and other is not None and other != ours:
        message = f"preset_model {ours} here and {other} in tensor_parallel: DeepSpeed raises ValueError."
        yield config.hit(f"{_EP}.preset_model", message, "Write the same in both.")
    if config.get(f"{_EP}.comm_backend") == "deepep" and not config.get(f"{_EP}.comm_max_tokens_per_rank"):
        message = "comm_backend deepep without comm_max_tokens_per_rank: DeepSpeed raises ValueError."
        yield config.hit(f"{_EP}.comm_backend", message, "Give the most tokens that one rank routes.")
    if config.at_least("0.19.8"):
        yield from _types(config)
        yield from _fused(config)


def _types(config: Config) -> Iterator[Hit]:
    yield from _typed(config, ("validate_folding_routing", "async_split_plan"), _is_switch, "true or false")
    yield from _typed(config, _NAMES, _is_name, "the name of an attribute, without dots, or null")
    counts = ("comm_qp_margin", "comm_max_tokens_per_rank")
    yield from _typed(config, counts, _is_count, "a whole number from 0 on")
    yield from _typed(config, ("comm_num_sm",), _is_size, "a whole number from 1 on")
    yield from _typed(config, ("has_shared_experts",), _is_maybe_switch, "true, false or null")
    yield from _typed(config, ("routed_scaling_factor",), _is_factor, "a number or auto")
    groups = ("num_limited_groups", "num_expert_groups")
    yield from _typed(config, groups, _is_maybe_size, "a number from 1 on, or null")
    limited, every = (config.number(f"{_EP}.{name}") for name in groups)
    if limited is not None and every is not None and limited > every >= 1:
        message = f"num_limited_groups {limited:g} of num_expert_groups {every:g}: DeepSpeed raises ValueError."
        yield config.hit(f"{_EP}.num_limited_groups", message, f"Write {every:g} or less.")


def _fused(config: Config) -> Iterator[Hit]:
    """Fused kernels without what they run in."""
    deepep, size = config.get(f"{_EP}.comm_backend") == "deepep", config.get(f"{_EP}.autoep_size")
    grouped = not config.has(f"{_EP}.use_grouped_mm") or config.get(f"{_EP}.use_grouped_mm")
    cut = (config.number("tensor_parallel.autotp_size") or 1) > 1
    blockers = {
        "gate_up_impl": "use_grouped_mm false" if not grouped else "",
        "row_weighting_impl": "" if deepep and size not in (None, 1) else "anything but deepep over several ranks",
    }
    for name, blocker in blockers.items():
        if config.get(f"{_EP}.{name}") == "fused" and blocker:
            message = f"{name} fused with {blocker}: DeepSpeed raises ValueError."
            yield config.hit(f"{_EP}.{name}", message, f"Leave {name} out.")
    if config.get(f"{_EP}.combine_impl") == "fused_weighted_sum" and (cut or (deepep and size not in (None, 1))):
        message = "combine_impl fused_weighted_sum with AutoTP or deepep: DeepSpeed raises ValueError."
        yield config.hit(f"{_EP}.combine_impl", message, "Leave combine_impl out.")


def _typed(config: Config, names: tuple[str, ...], fits: Callable[[Any], bool], words: str) -> Iterator[Hit]:
    for name in names:
        key = f"{_EP}.{name}"
        if config.has(key) and not fits(config.get(key)):
            message = f"{name} is {shown(config.get(key))}; DeepSpeed takes {words}, and raises."
            yield config.hit(key, message, f"Write {words}.")


_NAMES = (
    "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "router_pattern", "expert_pattern",
    "shared_experts_pattern", "shared_experts_gate_pattern",
)  # fmt: skip


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_maybe_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "" and "." not in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_maybe_size(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value >= 1)


def _is_factor(value: Any) -> bool:
    return value == "auto" or isinstance(value, int | float)
