"""Layouts per component, drawn at random from what dslaunch.runtime executes on 8 ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from tests.real.hetero_ranks import SAMPLES, WORLD, Case, Layout


def drawn(number: int, interleaved: bool = False, head: bool = False) -> Case:
    """The case of one number; the same each time.

    Args:
        interleaved: the trunk has 2 to 4 groups of ranks, each with 2 or 3 stages.
        head: another component makes the loss.
    """
    dice = random.Random(number)
    apart = dice.random() < 0.4
    room = dice.choice([2, 3, 4]) if apart else WORLD
    vision, projector = _layout(dice, room, 0), _layout(dice, room, 0, stages=(1,))
    several = (2, 3, 4) if interleaved else (1, 2, 3, 4)
    trunk = _layout(dice, WORLD - room if apart else WORLD, room if apart else 0, several)
    decoder = {"kv_heads": 2} if trunk.tp == 4 else {}
    """Twice as many shards as key and value heads: two shards share a head."""
    if interleaved:
        trunk = _interleaved(dice, trunk)
        decoder["layers"] = trunk.vpp * dice.choice([trunk.pp, trunk.pp + 1])
    fewest = math.gcd(vision.micro_batches, projector.micro_batches, trunk.micro_batches)
    trains = dice.random()
    return Case(
        vision,
        projector,
        trunk,
        schedule=dice.choice(["interleaved"] if interleaved else ["1f1b", "gpipe"]),
        rounds=dice.choice([0, *(n for n in range(1, fewest + 1) if _cuts(n, fewest, trunk))]),
        clip=dice.choice([0.0, 0.3]),
        masked=dice.random() < 0.5,
        frozen=("vision_encoder",) if trains < 0.2 else ("llm",) if trains < 0.3 else (),
        optimizer=dice.choice(["SGD", "AdamW"]),
        decoder=decoder,
        action_head=_head(dice, trunk) if head else None,
    )


def _head(dice: random.Random, trunk: Layout) -> Layout:
    """Somewhere on the ranks; its replicas share out each of the trunk's micro-batches."""
    together = SAMPLES // trunk.micro_batches
    grids = [(dp, tp) for dp in (1, 2, 3, 4) for tp in (1, 2, 3) if dp * tp <= WORLD and together % dp == 0]
    dp, tp = dice.choice(grids)
    passes = [n for n in (1, 2) if together // dp % n == 0]
    return Layout(
        dp=dp, tp=tp, zero=dice.choice([0, 1, 2, 3]), offset=dice.randint(0, WORLD - dp * tp),
        micro_batches=trunk.micro_batches * dice.choice(passes),
    )  # fmt: skip


def _interleaved(dice: random.Random, trunk: Layout) -> Layout:
    most = SAMPLES // trunk.dp
    counts = [n for n in (2, 3, 4, 6, 8, 12) if most % n == 0 and n % trunk.pp == 0]
    return replace(trunk, vpp=dice.choice([2, 3]), micro_batches=dice.choice(counts))


def _cuts(rounds: int, fewest: int, trunk: Layout) -> bool:
    """Whether a step can pass in as many rounds."""
    whole = trunk.vpp == 1 or trunk.micro_batches // rounds % trunk.pp == 0
    return fewest % rounds == 0 and whole


def _layout(dice: random.Random, room: int, first: int, stages: tuple[int, ...] = (1, 2, 3, 4)) -> Layout:
    """A grid of at most `room` ranks, somewhere from rank `first` on."""
    grids = [
        (pp, dp, tp)
        for pp in stages
        for dp in (1, 2, 3, 4)
        for tp in (1, 2, 3, 4)
        if pp * dp * tp <= room and pp * dp * tp * 3 > room
    ]
    pp, dp, tp = dice.choice(grids)
    most = SAMPLES // dp
    return Layout(
        pp, dp, tp,
        zero=dice.choice([0, 1] if pp > 1 else [0, 1, 2]),
        offset=first + dice.randint(0, room - pp * dp * tp),
        micro_batches=dice.choice([n for n in (1, 2, 3, 4, 6) if most % n == 0]),
        recompute=dice.choice(["none", "none", "selective", "full"]),
        lr=dice.choice([1e-3, 2e-3]),
        weight_decay=dice.choice([0.0, 0.1]),
    )  # fmt: skip
