"""What would make a plan fit: single changes and groups of them, each planned as the words that are shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from pydantic import ValidationError

from dslaunch.plan.evaluate import Evaluated
from dslaunch.schema.cluster import Cluster
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy

Change = tuple[str, Callable[[RunConfig], RunConfig]]


def with_strategy(config: RunConfig, name: str, **values: object) -> RunConfig:
    """The configuration with `strategy.NAME.KEY=VALUE` laid over it."""
    old = config.strategy.components.get(name, ComponentStrategy())
    new = old.model_copy(update=values)
    strategy = config.strategy.model_copy(update={"components": {**config.strategy.components, name: new}})
    return config.model_copy(update={"strategy": strategy})


def with_every(config: RunConfig, **values: object) -> RunConfig:
    """The configuration with `strategy.every.KEY=VALUE` laid over it."""
    every = config.strategy.every.model_copy(update=values)
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"every": every})})


def with_training(config: RunConfig, **values: object) -> RunConfig:
    """The configuration with `training.KEY=VALUE` laid over it."""
    return config.model_copy(update={"training": config.training.model_copy(update=values)})


def remedies(
    config: RunConfig, found: Evaluated, attempt: Callable[[RunConfig], Evaluated | None], most: int = 3
) -> list[str]:
    """Changes after which the plan fits, as overrides with the memory they need.

    As few changes together as do it, three at most; then the least growth of the cluster that does.

    Args:
        attempt: the ledgers of a changed configuration, or None where it is illegal or does not fit.
    """
    changes = list(_changes(config, found))
    for size in (1, 2, 3):
        groups = itertools.combinations(changes, size)
        fitting = _fitting(config, found, attempt, groups, most)
        if fitting:
            break
    growth = ((change,) for times in (2, 4, 8, 16) for change in _more_nodes(config, times))
    return fitting + _fitting(config, found, attempt, growth, 1)


def _fitting(
    config: RunConfig,
    found: Evaluated,
    attempt: Callable[[RunConfig], Evaluated | None],
    groups: Iterable[tuple[Change, ...]],
    most: int,
) -> list[str]:
    """Descriptions of the first `most` groups of changes that fit."""
    fitting: list[str] = []
    for group in groups:
        changed = config
        for _, change in group:
            changed = change(changed)
        if result := attempt(changed):
            words = " ".join(text for text, _ in group)
            slower = result.time.step_s / found.time.step_s
            other = _other_engine(found, result)
            fitting.append(f"{words} ({result.peak_gib:.1f} GiB, step time x{slower:.2f}{other})")
        if len(fitting) == most:
            break
    return fitting


def _other_engine(found: Evaluated, result: Evaluated) -> str:
    """The engine, where the change brings another one."""
    before, after = (next(iter(each.cases.values())).engine.name for each in (found, result))
    return "" if before == after else f", by engine {after}"


def _changes(config: RunConfig, found: Evaluated) -> Iterator[Change]:
    """Single changes, the cheapest in time first; those to the heaviest component before the others'."""
    narrow = config.training.precision
    if narrow != "fp32" and any(case.grad_accum_dtype == "fp32" for case in found.cases.values()):
        yield f"training.grad_accum_dtype={narrow}", lambda c: with_training(c, grad_accum_dtype=narrow)
    heaviest = sorted(found.memory, key=lambda name: -max(stage.total for stage in found.memory[name]))
    for name in heaviest[:2]:
        if found.cases[name].layout.recompute != "full":
            yield _strategy(name, recompute="full")
    heavy, layout = heaviest[0], found.cases[heaviest[0]].layout
    uniform = len(found.cases) > 1 and not found.cases[heavy].engine.per_component
    whose = "every" if uniform else heavy
    if layout.zero < 3:
        yield _strategy(whose, zero=layout.zero + 1)
    if (config.training.micro_batch or 1) > 1:
        yield "training.micro_batch=1", lambda c: with_training(c, micro_batch=1)
    yield _strategy(whose, tp=2 * layout.tp)
    yield _strategy(whose, pp=2 * layout.pp)
    if layout.offload == "none":
        yield _strategy(whose, offload="cpu")


def _strategy(name: str, **values: object) -> Change:
    """`strategy.NAME.KEY=VALUE`, of a component or of every one."""
    words = " ".join(f"strategy.{name}.{key}={value}" for key, value in values.items())
    if name == "every":
        return words, lambda config: with_every(config, **values)
    return words, lambda config: with_strategy(config, name, **values)


def _more_nodes(config: RunConfig, times: int) -> Iterator[Change]:
    """The size as it was given, in GPUs or in nodes, times as large; nothing where no such cluster can be."""
    cluster = config.cluster
    key, size = ("nodes", cluster.nodes) if cluster.nodes else ("gpus", cluster.gpus)
    if size is None or (cluster.nodes and cluster.gpus):
        return
    try:
        grown = Cluster(**{**cluster.model_dump(exclude_unset=True), key: size * times})
    except ValidationError:
        return
    words = f"cluster.{key}={size * times}"
    yield words, lambda config: config.model_copy(update={"cluster": grown})
