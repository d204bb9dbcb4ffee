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
from dslaunch.plan.schedules import SPLIT
from dslaunch.plan.search import Found, search, settled
from dslaunch.planfile import Prediction
from dslaunch.schema.config import RunConfig

_SEEN = 0.001
"""Of a step: what is less is not told."""
_MOST_TIMES = 64
"""As much larger as the given one is the largest cluster that is looked at."""


def explain(config: RunConfig, free: RunConfig, prediction: Prediction, tables: Tables) -> list[str]:
    """Sentences, in the order in which they are read.

    Args:
        config: as it was given, before a search decided anything of it.
        free: the same words with strategy=auto.
        prediction: what the plan of `config` predicts.
    """
    found = search(free, layouts_of.pinned(free), tables)
    lines = []
    if config.strategy.name != "auto":
        lines.append(_pinned(found if isinstance(found, Found) else None, prediction))
    elif isinstance(found, Found):
        lines += [*_why(found, prediction, tables), *_what_changes(config, found, tables)]
    goal = free.goal.model_copy(update={"name": "throughput", "tokens": None, "days": None})
    return [*lines, _smallest(free.model_copy(update={"goal": goal}), tables)]


def _pinned(found: Found | None, prediction: Prediction) -> str:
    """What a search would have taken in place of the layout that was given."""
    if found is None:
        return "The layout is pinned; strategy=auto finds none that fits here."
    times, chosen = found.chosen.step_s / prediction.step_time_s, found.chosen
    return (
        f"The layout is pinned; strategy=auto would take {words(chosen)}: {chosen.step_s:.3g} s a step "
        f"(x{times:.2f}), {chosen.peak_gib:.1f} GiB."
    )


def _why(found: Found, prediction: Prediction, tables: Tables) -> Iterator[str]:
    chosen, mine = found.chosen, _terms(_evaluated(found.config, found.chosen, tables))
    yield (
        f"{words(chosen)} won by goal {found.goal}; {found.notes.considered:,} layouts were covered. It takes "
        f"{chosen.step_s:.3g} s a step and {chosen.peak_gib:.1f} of {prediction.memory_limit_gib:.1f} GiB."
    )
    if chosen.layouts[chosen.trunk].pp == 1:
        yield f"Of the step, the trunk spends {_shares(mine)}."
    else:
        yield (
            f"Of the step, the trunk's slowest stage spends {_shares(mine)}; its stages idle "
            f"{prediction.bubble:.0%} on average."
        )
    others = [each for each in found.front.best if each is not chosen]
    if not others:
        yield "No other way to cut the trunk fits."
        return
    second = others[0]
    theirs = _terms(_evaluated(found.config, second, tables))
    yield (
        f"The next best is {words(second)}: {second.step_s:.3g} s, {second.peak_gib:.1f} GiB. On its slowest "
        f"stage of the trunk, against the winner's: {_differences(mine, theirs)}."
    )


def _differences(mine: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """The terms that differ most, such as `tp +0.412 s, pp -0.031 s`."""
    apart = {term: theirs[term] - mine[term] for term in mine}
    seen = [term for term in apart if abs(apart[term]) >= _SEEN * sum(mine.values())]
    largest = sorted(seen, key=lambda term: -abs(apart[term]))[:3]
    return ", ".join(f"{term} {apart[term]:+.3g} s" for term in largest) or "the same"


def _shares(terms: Mapping[str, float]) -> str:
    """Such as `compute 71 %, recompute 18 %, tp 9 %`, the largest first."""
    whole = sum(terms.values())
    largest = sorted(terms, key=lambda term: -terms[term])
    return ", ".join(f"{term} {terms[term] / whole:.0%}" for term in largest if terms[term] >= 0.005 * whole)


def _terms(found: Evaluated) -> Mapping[str, float]:
    """Seconds of a step on the trunk's slowest stage, by term; `waiting` is for other stages and components."""
    terms = max(found.time.stages[found.trunk.name], key=lambda terms: sum(terms.values()))
    return {**terms, "waiting": found.time.step_s - sum(terms.values())}


def _evaluated(config: RunConfig, scored: Scored, tables: Tables) -> Evaluated:
    config = settled(config, scored)
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
        else:
            same = words(other.chosen) == words(found.chosen)
            layout = "the same layout" if same else words(other.chosen)
            yield (
                f"{what}: {layout}: {other.chosen.step_s:.3g} s a step, x{_by_sample(other, found):.2f} a sample, "
                f"{other.chosen.peak_gib:.1f} GiB."
            )


def _by_sample(other: Found, found: Found) -> float:
    """GPU time that a sample takes, by what it takes of the plan."""
    one, two = (
        each.chosen.step_s * each.config.cluster.world_size / each.config.training.global_batch
        for each in (found, other)
    )
    return two / one


def _changes(config: RunConfig, found: Found) -> Iterator[tuple[str, RunConfig]]:
    cluster, batch = config.cluster, config.training.global_batch
    memory = 2 * cluster.gpu.memory_gib
    larger = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"memory_gib": memory})})
    yield f"With GPUs of {memory:g} GiB", config.model_copy(update={"cluster": larger})
    if cluster.network is not None and cluster.node_count > 1:
        speed = 2 * cluster.network.gb_per_s
        network = cluster.network.model_copy(update={"gb_per_s": speed})
        faster = cluster.model_copy(update={"network": network})
        yield f"With a network of {speed:g} GB/s a GPU", config.model_copy(update={"cluster": faster})
    yield f"With training.global_batch={2 * batch}", with_training(config, global_batch=2 * batch)
    if found.chosen.schedule in SPLIT and config.training.schedule is None:
        yield "With training.schedule=1f1b", with_training(config, schedule="1f1b")
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
