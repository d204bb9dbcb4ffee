"""`dslaunch plan --explain`: why the plan is what it is, what would change it, and the smallest cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslaunch.engines.registry import ENGINES
from dslaunch.errors import PlanError
from dslaunch.hardware.efficiency import Tables
from dslaunch.hardware.topology import describe
from dslaunch.plan import layouts as layouts_of
from dslaunch.plan.account import words
from dslaunch.plan.engine_choice import candidates, grad_accum
from dslaunch.plan.evaluate import Evaluated, evaluate
from dslaunch.plan.front import Scored
from dslaunch.plan.goals import grown, resized
from dslaunch.plan.remedies import with_training
from dslaunch.plan.search import Found, search
from dslaunch.plan.space import scheduled
from dslaunch.planfile import Prediction
from dslaunch.schema.config import RunConfig

_MOST_TIMES = 64
"""As much larger as the given one is the largest cluster that is looked at."""


def explain(config: RunConfig, prediction: Prediction, tables: Tables) -> list[str]:
    """Sentences, in the order in which they are read.

    Args:
        config: as it was given, before a search decided anything of it.
        prediction: what the plan of it predicts.
    """
    free = _free(config)
    found = search(config if config.strategy.name == "auto" else free, layouts_of.pinned(free), tables)
    lines = []
    if config.strategy.name != "auto":
        lines.append(_pinned(found if isinstance(found, Found) else None, prediction))
    elif isinstance(found, Found):
        lines += [*_why(found, tables), *_what_changes(config, found, tables)]
    return [*lines, _smallest(free, tables)]


def _free(config: RunConfig) -> RunConfig:
    """The same, searched for throughput, with what the user set of single components."""
    goal = config.goal.model_copy(update={"name": "throughput", "tokens": None, "days": None})
    strategy = config.strategy.model_copy(update={"name": "auto"})
    return config.model_copy(update={"strategy": strategy, "goal": goal})


def _pinned(found: Found | None, prediction: Prediction) -> str:
    """What a search would have taken in place of the layout that was given."""
    if found is None:
        return "The layout is pinned; strategy=auto finds none that fits here."
    times, chosen = found.chosen.step_s / prediction.step_time_s, found.chosen
    return (
        f"The layout is pinned; strategy=auto would take {words(chosen)}: {chosen.step_s:.3g} s a step "
        f"(x{times:.2f}), {chosen.peak_gib:.1f} GiB."
    )


def _why(found: Found, tables: Tables) -> Iterator[str]:
    chosen = found.chosen
    yield (
        f"{words(chosen)} won by goal {found.goal}. {found.notes.considered:,} layouts were covered; it takes "
        f"{chosen.step_s:.3g} s a step and {chosen.peak_gib:.1f} GiB."
    )
    others = [each for each in found.front.best if each is not chosen]
    if not others:
        yield "No other way to cut the trunk fits."
        return
    second = others[0]
    mine, theirs = (_terms(_evaluated(found.config, each, tables)) for each in (chosen, second))
    yield (
        f"The next best is {words(second)}: {second.step_s:.3g} s, {second.peak_gib:.1f} GiB. On its slowest "
        f"stage of the trunk, against the winner's: {_differences(mine, theirs)}."
    )


def _differences(mine: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """The terms that differ most, such as `tp +0.412 s, pp -0.031 s`."""
    apart = {term: theirs[term] - mine[term] for term in mine}
    largest = sorted(apart, key=lambda term: -abs(apart[term]))[:3]
    return ", ".join(f"{term} {apart[term]:+.3g} s" for term in largest)


def _terms(found: Evaluated) -> Mapping[str, float]:
    """Seconds of the trunk's slowest stage, by term."""
    trunk = next(name for name, case in found.cases.items() if case.is_trunk)
    return max(found.time.stages[trunk], key=lambda terms: sum(terms.values()))


def _evaluated(config: RunConfig, scored: Scored, tables: Tables) -> Evaluated:
    config = scheduled(config, scored.schedule)
    engine = ENGINES[scored.engine]
    dtype, _ = grad_accum(config, engine, scored.layouts)
    return evaluate(config, engine, scored.layouts, dtype, tables)


def _what_changes(config: RunConfig, found: Found, tables: Tables) -> Iterator[str]:
    """The choice under another limit, each searched anew."""
    for what, changed in _changes(config, found):
        try:
            other = search(changed, layouts_of.pinned(changed), tables)
        except PlanError:
            continue
        if not isinstance(other, Found):
            yield f"{what}: nothing fits."
        elif words(other.chosen) == words(found.chosen):
            yield f"{what}: the same layout, {other.chosen.step_s:.3g} s a step."
        else:
            yield (
                f"{what}: {words(other.chosen)}, {other.chosen.step_s:.3g} s a step, "
                f"{other.chosen.peak_gib:.1f} GiB."
            )


def _changes(config: RunConfig, found: Found) -> Iterator[tuple[str, RunConfig]]:
    cluster, batch = config.cluster, config.training.global_batch
    memory = 2 * cluster.gpu.memory_gib
    larger = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"memory_gib": memory})})
    yield f"With GPUs of {memory:g} GiB", config.model_copy(update={"cluster": larger})
    yield f"With training.global_batch={2 * batch}", with_training(config, global_batch=2 * batch)
    others = tuple(name for name in candidates(config) if name != found.chosen.engine)
    if others:
        goal = config.goal.model_copy(update={"engines": others})
        yield f"Without engine {found.chosen.engine}", config.model_copy(update={"goal": goal})


def _smallest(free: RunConfig, tables: Tables) -> str:
    """The fewest whole nodes on which something fits: up to the given ones, or doublings of them."""
    goal = free.goal.model_copy(update={"name": "fewest_gpus"})
    small = search(free.model_copy(update={"goal": goal}), layouts_of.pinned(free), tables)
    times = 2
    while not isinstance(small, Found) and times <= _MOST_TIMES and (more := grown(free, times)) is not None:
        small = search(more, layouts_of.pinned(more), tables)
        times *= 2
    if not isinstance(small, Found):
        most = resized(free, free.cluster.node_count)
        return f"Nothing fits on {describe(most.cluster)}, nor on larger clusters that were tried."
    return (
        f"The smallest cluster that fits is {describe(small.config.cluster)}: {words(small.chosen)}, "
        f"{small.chosen.step_s:.3g} s a step, {small.chosen.peak_gib:.1f} GiB."
    )
