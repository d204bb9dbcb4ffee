"""global_batch = micro_batch * num_microbatches * dp, for every component; where it does not hold, what would."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dslaunch.errors import listed
from dslaunch.schema.config import RunConfig
from dslaunch.schema.strategy import ComponentStrategy


@dataclass(frozen=True)
class _Asked:
    """The numbers that a component's batch follows from."""

    name: str
    dp: int
    own: int | None
    """strategy.COMPONENT.micro_batch."""
    shared: int | None
    """training.micro_batch."""
    num: int | None
    """training.num_microbatches, which the trunk reads."""
    rounds: int = 1
    """What num_microbatches has to be a multiple of."""

    @property
    def micro(self) -> int | None:
        return self.own or self.shared

    @property
    def step(self) -> int:
        """What global_batch has to be a multiple of."""
        return (self.micro or 1) * self.dp * (self.num or self.rounds)

    def holds(self, total: int) -> bool:
        """Whether `total` samples a step are whole micro-batches, and as many of them as were asked for."""
        if self.num and self.num % self.rounds:
            return False
        return total == self.step if self.num and self.micro else total % self.step == 0


def batches(
    config: RunConfig, wanted: Mapping[str, ComponentStrategy], replicas: Mapping[str, int]
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """((micro_batch, num_microbatches) by component, faults: one for all components that do not divide).

    Args:
        replicas: dp of each component.
    """
    total, shared = config.training.global_batch, config.training.micro_batch
    trunk, num = config.model.trunk, config.training.num_microbatches

    def passes(name: str, dp: int) -> int | None:
        """The trunk's number, and where nothing is said of the micro-batch the others' too."""
        follows = num and not (shared or wanted[name].micro_batch) and total % (num * dp) == 0
        return num if name == trunk or follows else None

    asked = [
        _Asked(name, dp, wanted[name].micro_batch, shared, passes(name, dp)) for name, dp in replicas.items()
    ]
    wrong = [each for each in asked if not each.holds(total)]
    found = {each.name: _sizes(each, total) for each in asked}
    if not wrong:
        return found, []
    ways = _legal_changes([_in_rounds(config, wanted, each) for each in asked], total)
    advice = f"Legal and nearest: {', or '.join(ways)}." if ways else "No one number makes all of them whole."
    alike: dict[_Asked, list[str]] = {}
    for each in wrong:
        alike.setdefault(replace(each, name=""), []).append(each.name)
    shown = "; ".join(_arithmetic(each, listed(names, 3), total) for each, names in alike.items())
    return found, [f"{_key(wrong[0])}{shown}. {advice}"]


def _in_rounds(config: RunConfig, wanted: Mapping[str, ComponentStrategy], asked: _Asked) -> _Asked:
    """The interleaved schedule runs the trunk's micro-batches in rounds of pp."""
    order = config.training.order(wanted[config.model.trunk].vpp or 1)
    if asked.name != config.model.trunk or order != "interleaved":
        return asked
    return replace(asked, rounds=wanted[asked.name].pp or 1)


def not_whole(shown: str, number: int, by: int) -> str:
    """`A / B = 7.812 is not whole`; without the quotient where four digits of it would look whole."""
    quotient = f"{number / by:.4g}" if number < 10_000 * by else ""
    return f"{shown} = {quotient} is not whole" if "." in quotient else f"{shown} is not whole"


def _sizes(asked: _Asked, total: int) -> tuple[int, int]:
    """(micro_batch, num_microbatches); the nearest whole ones where the batch does not divide."""
    if asked.num:
        return asked.micro or max(1, total // asked.step), asked.num
    return asked.micro or 1, max(1, total // asked.step)


def _key(asked: _Asked) -> str:
    """The key that is at fault, and its value; empty where the arithmetic names them."""
    if asked.num:
        return "" if asked.micro else f"training.num_microbatches is {asked.num}: "
    return f"{f'strategy.{asked.name}' if asked.own else 'training'}.micro_batch is {asked.micro or 1}: "


def _arithmetic(asked: _Asked, names: str, total: int) -> str:
    if asked.num and asked.micro:
        return (
            f"training.global_batch is {total}, but micro_batch {asked.micro} x num_microbatches {asked.num} x dp "
            f"{asked.dp} ({names}) = {asked.step}"
        )
    part = f"num_microbatches {asked.num}" if asked.num else f"micro_batch {asked.micro or 1}"
    return not_whole(f"global_batch {total} / ({part} x dp {asked.dp}, {names})", total, asked.step)


def _legal_changes(asked: list[_Asked], total: int) -> list[str]:
    """Overrides, each legal for every component when it is typed; two together where no single one is."""
    trunk = next((each for each in asked if each.num), None)
    ways = []
    count = total // (trunk.micro * trunk.dp) if trunk and trunk.micro else 0
    if count and _all_hold([replace(each, num=each.num and count) for each in asked], total):
        ways.append(f"training.num_microbatches={count}")
    if near := [batch for batch in _near(asked, total) if _all_hold(asked, batch)]:
        ways.append("training.global_batch=" + " or ".join(map(str, near)))
    if size := _shared_micro_batch(asked, total):
        ways.append(f"training.micro_batch={size}")
    return ways or _pairs(asked, trunk, total)


def _all_hold(asked: list[_Asked], total: int) -> bool:
    return all(each.holds(total) for each in asked)


def _near(asked: list[_Asked], total: int) -> list[int]:
    """The multiples of every component's step on both sides of `total`, or the one that is fixed."""
    fixed = [each.step for each in asked if each.num and each.micro]
    if fixed:
        return fixed
    step = math.lcm(*(each.step for each in asked))
    below = total // step * step
    return [batch for batch in (below, below + step) if batch]


def _shared_micro_batch(asked: list[_Asked], total: int) -> int | None:
    """The training.micro_batch nearest to the one given with which all components divide."""
    given = next((each.shared for each in asked if each.shared), None)
    if given is None:
        return None
    sizes = [n for each in asked if each.num for n in [total // (each.num * each.dp)] if n]
    sizes = sizes or [n for n in range(given - 1, 0, -1) if given % n == 0]
    fits = (n for n in sizes if _all_hold([replace(each, shared=n) for each in asked], total))
    return next(fits, None)


def _pairs(asked: list[_Asked], trunk: _Asked | None, total: int) -> list[str]:
    """global_batch for all components, and the num_microbatches that follows from it."""
    if trunk is None or trunk.micro is None:
        return []
    free = [replace(each, num=None) for each in asked]
    per_count = trunk.micro * trunk.dp
    return [
        f"training.global_batch={batch} training.num_microbatches={batch // per_count}"
        for batch in _near(free, total)
    ]
