"""DeepSpeed's scheduler block as training.optimizer's schedule."""

from __future__ import annotations

from dslaunch.importing.deepspeed_source import Source
from dslaunch.importing.recipe import Recipe
from dslaunch.render.decimals import product

_KINDS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DEFAULT_WARMUP = 1000
"""warmup_num_steps where it is absent (deepspeed/runtime/lr_schedules.py, 0.19.8)."""
_DEFAULT_COS_MIN_RATIO = 0.0001
_LEAST_WARMUP = 2
"""Steps that DeepSpeed's warm-ups take at least."""


def take_schedule(recipe: Recipe, source: Source) -> None:
    """A schedule that dslaunch does not have is told, and a constant learning rate stands for it."""
    kind = source.take("scheduler.type")
    if kind == "OneCycle" and source.left.get("scheduler.params.cycle_first_step_size") == 1:
        _take_line(recipe, source)
        return
    schedule = _KINDS.get(kind)
    params = [key.removeprefix("scheduler.params.") for key in source.under("scheduler.params")]
    if schedule is None:
        if kind is not None:
            source.note(
                "scheduler.type", f"{kind}: dslaunch has constant, linear and cosine; constant is written"
            )
        for key in params:
            source.left.pop(f"scheduler.params.{key}")
            source.note(f"scheduler.params.{key}", f"a parameter of {kind}")
        recipe.put("training.optimizer.schedule", "constant")
        recipe.put("training.optimizer.warmup_steps", 0)
        return
    recipe.put("training.optimizer.schedule", schedule)
    if recipe.get("engine.huggingface"):
        source.note("scheduler.type", f"{kind}: the Trainer makes the schedule, from its own arguments")
    _warmup(recipe, source, params)
    total = source.whole("scheduler.params.total_num_steps")
    if total is not None:
        recipe.put("training.steps", total)
    _ends(recipe, source, str(kind))
    for key in source.under("scheduler.params"):
        source.left.pop(key)
        source.note(key, f"a parameter of {kind} that dslaunch does not model")


def _take_line(recipe: Recipe, source: Source) -> None:
    """A OneCycle that is at its peak after one step: what linear without warm-up is written as."""
    recipe.put("training.optimizer.schedule", "linear")
    recipe.put("training.optimizer.warmup_steps", 0)
    source.take("scheduler.params.cycle_first_step_size")
    steps = source.whole("scheduler.params.cycle_second_step_size")
    if steps is not None:
        recipe.put("training.steps", steps + 1)
    low, peak = (source.real(f"scheduler.params.cycle_{end}_lr") for end in ("min", "max"))
    recipe.put("training.optimizer.min_lr", low or 0.0)
    if peak is not None:
        recipe.tree["training"]["optimizer"]["lr"] = peak
    source.take("scheduler.params.cycle_momentum")
    for key in source.under("scheduler.params"):
        source.left.pop(key)
        source.note(key, "a parameter of OneCycle that dslaunch does not model")


def _warmup(recipe: Recipe, source: Source, params: list[str]) -> None:
    steps = source.whole("scheduler.params.warmup_num_steps")
    if steps is None and "warmup_num_steps" not in params:
        steps = _DEFAULT_WARMUP
    recipe.put("training.optimizer.warmup_steps", _LEAST_WARMUP if steps is None else steps)
    if source.take("scheduler.params.warmup_type") in (None, "log"):
        source.note("scheduler.params.warmup_type", "log (DeepSpeed's default): a linear warm-up is written")


def _ends(recipe: Recipe, source: Source, kind: str) -> None:
    """The learning rate before the warm-up, after it, and at the end."""
    if source.take("scheduler.params.warmup_min_lr"):
        source.note("scheduler.params.warmup_min_lr", "the warm-up starts at 0")
    if source.take("scheduler.params.warmup_min_ratio"):
        source.note("scheduler.params.warmup_min_ratio", "the warm-up starts at 0")
    peak = source.real("scheduler.params.warmup_max_lr")
    lr = recipe.get("training.optimizer.lr")
    if peak is not None and lr is None:
        recipe.put("training.optimizer.lr", peak)
    elif peak is not None and peak != lr:
        source.note(
            "optimizer.params.lr", f"{lr}: the scheduler's warmup_max_lr {peak} is the peak, and wins"
        )
        recipe.tree["training"]["optimizer"]["lr"] = peak
    ratio = source.real("scheduler.params.cos_min_ratio")
    lr = recipe.get("training.optimizer.lr")
    if kind == "WarmupCosineLR" and lr is not None:
        floor = product(lr, _DEFAULT_COS_MIN_RATIO if ratio is None else ratio)
        recipe.put("training.optimizer.min_lr", floor)
