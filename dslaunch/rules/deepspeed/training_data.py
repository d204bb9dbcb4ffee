"""DeepSpeed's own sampling and routing of data: the section data_efficiency."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import Config, config_rule
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit

_CONFIG = "deepspeed/runtime/data_pipeline/config.py 0.19.8, run"
_SAMPLING, _ROUTING = "data_efficiency.data_sampling", "data_efficiency.data_routing"
_METRIC_NEEDS = ("min_difficulty", "max_difficulty", "schedule_type", "difficulty_type", "clustering_type")
_SCHEDULES = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "custom": (),
}
"""What each schedule's `schedule_config` must hold."""
_LTD_NEEDS = (
    "total_layer_num", "random_ltd_layer_num", "random_ltd_schedule", "random_ltd_schedule.min_value",
    "random_ltd_schedule.max_value", "random_ltd_schedule.schedule_type", "random_ltd_schedule.schedule_config",
    "random_ltd_schedule.schedule_config.require_steps", "random_ltd_schedule.schedule_config.seq_per_step",
)  # fmt: skip


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
    "data.curriculum", severity="error",
    evidence="deepspeed/runtime/data_pipeline/curriculum_scheduler.py, data_sampling/data_sampler.py 0.19.8, run",
)  # fmt: skip
def curriculum(config: Config) -> Iterator[Hit]:
    """A metric of the curriculum without what its schedule needs."""
    key = f"{_SAMPLING}.curriculum_learning"
    metrics = config.get(f"{key}.curriculum_metrics")
    enabled = config.get(f"{key}.enabled") and config.get("data_efficiency.enabled")
    if not enabled or not isinstance(metrics, dict):
        return
    for name, metric in metrics.items():
        at = f"{key}.curriculum_metrics.{name}"
        if not isinstance(metric, dict) or "." in name:
            continue
        kind, details = metric.get("schedule_type"), metric.get("schedule_config")
        missing = [need for need in _METRIC_NEEDS if need not in metric]
        if "schedule_type" in metric and kind not in _SCHEDULES:
            message = f"schedule_type is {shown(kind)}: RuntimeError, Unsupported curriculum schedule type."
            yield config.hit(f"{at}.schedule_type", message, f"Write one of {', '.join(_SCHEDULES)}.")
            continue
        held = details if isinstance(details, dict) else {}
        missing += [f"schedule_config.{need}" for need in _SCHEDULES.get(str(kind), ()) if need not in held]
        if missing:
            message = f"{name} has no {', '.join(missing)}: making the sampler of training_data fails."
            yield config.hit(at, message, f"Give {', '.join(missing)}.")
        steps, levels = held.get("max_step"), held.get("difficulty")
        if kind != "fixed_discrete" or not isinstance(steps, list) or not isinstance(levels, list):
            continue
        if not steps or len(levels) != len(steps) + 1:
            message = f"difficulty has {len(levels)} values and max_step {len(steps)}: AssertionError."
            fix = "Give two difficulties or more, and max_step for all but the last."
            yield config.hit(f"{at}.schedule_config", message, fix)


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
    missing = [need for need in missing if not any(need.startswith(f"{other}.") for other in missing)]
    kind = config.get(f"{key}.random_ltd_schedule.schedule_type")
    if missing:
        message = f"random_ltd is enabled without {', '.join(missing)}: KeyError when the engine is built."
        yield config.hit(key, message, f"Give {', '.join(missing)}.")
    elif kind != "fixed_linear":
        message = f"schedule_type is {shown(kind)}: RuntimeError, fixed_linear is the only one there is."
        yield config.hit(f"{key}.random_ltd_schedule.schedule_type", message, "Write fixed_linear.")
    elif config.get(f"{key}.layer_token_lr_schedule.enabled"):
        message = "layer_token_lr_schedule is enabled: DeepSpeed raises that it isn't supported yet."
        yield config.hit(f"{key}.layer_token_lr_schedule", message, "Switch it off.")
    if not missing and not config.has(f"{key}.random_ltd_layer_id"):
        message = "random_ltd is enabled without random_ltd_layer_id: convert_to_random_ltd raises KeyError."
        yield config.hit(key, message, "Give the numbers of the layers.", raised_by="nobody")


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
