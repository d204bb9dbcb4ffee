"""What would make a plan fit: single changes and pairs of them, each tried on the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from dslaunch.plan.evaluate import Evaluated
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

Change = tuple[str, Callable[[RunConfig], RunConfig]]


def with_strategy(config: RunConfig, name: str, **values: object) -> RunConfig:
    """The configuration with `strategy.NAME.KEY=VALUE` laid over it."""
    old = config.strategy.components.get(name, ComponentStrategy())
    new = old.model_copy(update=values)
    strategy = config.strategy.model_copy(update={"components": {**config.strategy.components, name: new}})
    return config.model_copy(update={"strategy": strategy})


def with_training(config: RunConfig, **values: object) -> RunConfig:
    """The configuration with `training.KEY=VALUE` laid over it."""
    return config.model_copy(update={"training": config.training.model_copy(update=values)})


def remedies(
    config: RunConfig, found: Evaluated, attempt: Callable[[RunConfig], Evaluated | None], most: int = 4
) -> list[str]:
    """Changes after which the plan fits, as overrides with the memory they need; pairs where no single one does.

    Args:
        attempt: the ledgers of a changed configuration, or None where it is illegal or does not fit.
    """
    changes = list(_changes(config, found))
    for size in (1, 2):
        fitting = []
        for group in itertools.combinations(changes, size):
            changed = config
            for _, change in group:
                changed = change(changed)
            if result := attempt(changed):
                words = " ".join(text for text, _ in group)
                slower = result.time.step_s / found.time.step_s
                fitting.append(f"{words} ({result.peak_gib:.1f} GiB, step time x{slower:.2f})")
            if len(fitting) == most:
                break
        if fitting:
            return fitting
    return []


def _changes(config: RunConfig, found: Evaluated) -> Iterator[Change]:
    heavy = max(found.memory, key=lambda name: max(stage.total for stage in found.memory[name]))
    layout = found.cases[heavy].layout
    key = f"strategy.{heavy}"

    def strategy(**values: object) -> Callable[[RunConfig], RunConfig]:
        return lambda c: with_strategy(c, heavy, **values)

    if layout.recompute != "full":
        yield f"{key}.recompute=full", strategy(recompute="full")
    if layout.zero < 3:
        yield f"{key}.zero={layout.zero + 1}", strategy(zero=layout.zero + 1)
    if found.cases[heavy].grad_accum_dtype == "fp32" and config.training.precision != "fp32":
        narrow = config.training.precision
        yield f"training.grad_accum_dtype={narrow}", lambda c: with_training(c, grad_accum_dtype=narrow)
    if (config.training.micro_batch or 1) > 1:
        yield "training.micro_batch=1", lambda c: with_training(c, micro_batch=1)
    yield f"{key}.tp={2 * layout.tp}", strategy(tp=2 * layout.tp, dp=None)
    yield f"{key}.pp={2 * layout.pp}", strategy(pp=2 * layout.pp, dp=None, layers_per_stage=None)
    if layout.offload == "none":
        yield f"{key}.offload=cpu", strategy(offload="cpu")
    for times in (2, 4, 8):
        yield f"{times}x the GPUs", _more_nodes(times)


def _more_nodes(times: int) -> Callable[[RunConfig], RunConfig]:
    def change(config: RunConfig) -> RunConfig:
        cluster = config.cluster
        size = {"gpus": None, "nodes": cluster.node_count * times, "gpus_per_node": cluster.slots, "hosts": ()}
        return config.model_copy(update={"cluster": cluster.model_copy(update=size)})

    return change
