"""What a search looks for, and on which sizes of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import PlanError
from dslaunch.plan.front import Front, Scored
from dslaunch.schema.config import RunConfig

_EVERY_SIZE = 64
"""Nodes up to which every number is tried; above, in steps of a thirty-second or less."""


def goal_faults(config: RunConfig) -> list[str]:
    """A goal that this strategy does not read, or that lacks what it needs."""
    goal, asked = config.goal, config.engine.name
    faults = []
    if goal.name != "throughput" and config.strategy.name != "auto":
        faults.append(
            f"goal is {goal.name}, which strategy=auto searches for; strategy is {config.strategy.name}. "
            "Set strategy=auto, or goal=throughput"
        )
    if goal.name == "cost" and config.cluster.price_per_gpu_hour is None:
        faults.append("goal is cost, and cluster.price_per_gpu_hour is missing: give the price in USD")
    if asked != "auto" and goal.engines and asked not in goal.engines:
        faults.append(
            f"engine is {asked}, and goal.engines allows {', '.join(goal.engines)}: set engine=auto, or add it"
        )
    return faults


def sized(config: RunConfig) -> bool:
    """Whether smaller clusters than the one given are looked at."""
    return config.goal.name in ("fewest_gpus", "deadline", "cost")


def sizes(config: RunConfig) -> list[int]:
    """Numbers of nodes to try, ascending; the given one alone where the goal does not ask."""
    most = config.cluster.node_count
    return _up_to(most) if sized(config) else [most]


def resized(config: RunConfig, nodes: int) -> RunConfig:
    """The configuration on the first `nodes` nodes of its cluster."""
    cluster = config.cluster
    if nodes == cluster.node_count:
        return config
    smaller = {"gpus": None, "nodes": nodes, "gpus_per_node": cluster.slots, "hosts": cluster.hosts[:nodes]}
    return config.model_copy(update={"cluster": cluster.model_copy(update=smaller)})


def grown(config: RunConfig, times: int) -> RunConfig | None:
    """The configuration on so many times the nodes; None where the cluster cannot have them."""
    cluster, nodes = config.cluster, config.cluster.node_count * times
    if cluster.network is None or (cluster.available_nodes or nodes) < nodes:
        return None
    larger = {"gpus": None, "nodes": nodes, "gpus_per_node": cluster.slots, "hosts": ()}
    return config.model_copy(update={"cluster": cluster.model_copy(update=larger)})


def step_limit_s(config: RunConfig) -> float | None:
    """Seconds of a step with which the tokens are done in time; None where nobody asks."""
    goal = config.goal
    if goal.tokens is None or goal.days is None:
        return None
    return goal.days * 86400 * config.training.global_batch * config.training.seq_len / goal.tokens


def best_of(config: RunConfig, front: Front) -> Scored | None:
    """The best candidate that meets the limit of time; None where none does."""
    limit = step_limit_s(config)
    return next((each for each in front.best if limit is None or each.step_s <= limit), None)


def decided(config: RunConfig, best: dict[int, Scored]) -> int | None:
    """The number of nodes to take, once it is known; `best` has those tried so far, with what was found there."""
    if not best:
        return None
    if config.goal.name == "cost":
        return min(best, key=lambda nodes: (nodes * best[nodes].step_s, nodes))
    return min(best)


def words(config: RunConfig, nodes: int, given: int) -> str:
    """The goal and what came of it, in words."""
    goal, gpus = config.goal, nodes * config.cluster.slots
    size = f"{gpus} of {given * config.cluster.slots} GPUs ({nodes} of {given} nodes)"
    limit = step_limit_s(config)
    time = "" if limit is None else f" that trains on {goal.tokens:g} tokens in {goal.days:g} days"
    return {
        "throughput": "throughput: the shortest step",
        "lowest_memory": "lowest_memory: the least GPU memory",
        "fewest_gpus": f"fewest_gpus: {size}, the smallest number of nodes on which a plan fits",
        "deadline": f"deadline: {size}, the smallest number of nodes{time} (steps of {limit or 0:.3g} s or less)",
        "cost": f"cost: {size}, the lowest price of a step of all numbers of nodes{time}",
    }[goal.name]


def too_slow(config: RunConfig, fastest: Scored) -> PlanError:
    """No plan meets the deadline; the fastest there is, on the cluster as it is given."""
    limit, goal = step_limit_s(config), config.goal
    assert limit is not None
    assert goal.days is not None
    return PlanError(
        f"goal.days is {goal.days:g}: {goal.tokens:g} tokens need steps of {limit:.3g} s or less, and the fastest "
        f"plan that fits takes {fastest.step_s:.3g} s on {config.cluster.world_size} GPUs, "
        f"{goal.days * fastest.step_s / limit:.3g} days. Use more GPUs, or goal.days="
        f"{goal.days * fastest.step_s / limit * 1.005:.3g}"
    )


def _up_to(most: int) -> list[int]:
    return sorted({*_steps(most), most})


def _steps(most: int) -> Iterator[int]:
    nodes = 1
    while nodes <= most:
        yield nodes
        nodes += 1 if nodes < _EVERY_SIZE else 2 ** ((nodes // (_EVERY_SIZE // 2)).bit_length() - 1)
