"""DeepSpeed's own sampling and routing of data: the section data_efficiency."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.config import Config, config_rule
from dslaunch.rules.registry import Hit

_CONFIG = "deepspeed/runtime/data_pipeline/config.py 0.19.8, run"
_SAMPLING, _ROUTING = "data_efficiency.data_sampling", "data_efficiency.data_routing"
_LTD_NEEDS = ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "random_ltd_schedule")


@config_rule("data.sampling", severity="error", raised_by="DeepSpeedConfig", evidence=_CONFIG)
def sampling(config: Config) -> Iterator[Hit]:
    """Curriculum learning or dynamic batching that is enabled without what it needs."""
    for name, need in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        key = f"{_SAMPLING}.{name}"
        if config.get(f"{key}.enabled") and not config.has(f"{key}.{need}"):
            yield config.hit(
                key, f"{name} is enabled without {need}: DeepSpeed asserts that it is there.", f"Give {need}."
            )


@config_rule(
    "data.random-ltd", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/runtime/data_pipeline/data_routing/scheduler.py 0.19.8, run",
)  # fmt: skip
def random_ltd(config: Config) -> Iterator[Hit]:
    """Random layer-token drop that is enabled without what it needs."""
    key = f"{_ROUTING}.random_ltd"
    if not config.get(f"{key}.enabled"):
        return
    missing = [need for need in _LTD_NEEDS if not config.has(f"{key}.{need}")]
    if missing:
        message = f"random_ltd is enabled without {', '.join(missing)}: KeyError when the engine is built."
        yield config.hit(key, message, f"Give {', '.join(missing)}.")
    elif config.get(f"{key}.layer_token_lr_schedule.enabled"):
        message = "layer_token_lr_schedule is enabled: DeepSpeed raises that it isn't supported yet."
        yield config.hit(f"{key}.layer_token_lr_schedule", message, "Switch it off.")


@config_rule("data.switches", severity="info", evidence=_CONFIG)
def switches(config: Config) -> Iterator[Hit]:
    """An inner switch of data_efficiency that is on below one that is off."""
    for inner, outer in (
        (f"{_SAMPLING}.curriculum_learning", _SAMPLING), (f"{_ROUTING}.random_ltd", _ROUTING),
    ):  # fmt: skip
        levels = [level for level in (outer, "data_efficiency") if not config.get(f"{level}.enabled")]
        if config.get(f"{inner}.enabled") and levels:
            name = inner.rpartition(".")[2]
            message = f"{name} is enabled, but {levels[0]} isn't: the engine reads the inner switch alone."
            yield config.hit(f"{inner}.enabled", message, "Switch all levels the same way.")
