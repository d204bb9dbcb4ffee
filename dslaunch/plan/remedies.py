"""What would make a plan fit: single changes and pairs of them, each tried on the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

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
    growth = ((_more_nodes(times),) for times in (2, 4, 8, 16))
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
            fitting.append(f"{words} ({result.peak_gib:.1f} GiB, step time x{slower:.2f})")
        if len(fitting) == most:
            break
    return fitting


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
    if layout.zero < 3:
        yield _strategy(heavy, zero=layout.zero + 1)
    if (config.training.micro_batch or 1) > 1:
        yield "training.micro_batch=1", lambda c: with_training(c, micro_batch=1)
    yield _strategy(heavy, tp=2 * layout.tp)
    yield _strategy(heavy, pp=2 * layout.pp)
    if layout.offload == "none":
        yield _strategy(heavy, offload="cpu")


def _strategy(name: str, **values: object) -> Change:
    """`strategy.NAME.KEY=VALUE`."""
    words = " ".join(f"strategy.{name}.{key}={value}" for key, value in values.items())
    return words, lambda config: with_strategy(config, name, **values)


def _more_nodes(times: int) -> Change:
    def change(config: RunConfig) -> RunConfig:
        cluster = config.cluster
        size = {
            "gpus": None,
            "nodes": cluster.node_count * times,
            "gpus_per_node": cluster.slots,
            "hosts": (),
        }
        return config.model_copy(update={"cluster": cluster.model_copy(update=size)})

    return f"{times}x the nodes", change
