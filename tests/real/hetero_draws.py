"""Layouts per component, drawn at random from what dslaunch.runtime executes on 8 ranks."""

from __future__ import annotations

import math
import random

from tests.real.hetero_ranks import SAMPLES, WORLD, Case, Layout


def drawn(number: int) -> Case:
    """The case of one number; the same each time."""
    dice = random.Random(number)
    apart = dice.random() < 0.4
    room = dice.choice([2, 3, 4]) if apart else WORLD
    vision, projector = _layout(dice, room, 0), _layout(dice, room, 0, stages=(1,))
    trunk = _layout(dice, WORLD - room if apart else WORLD, room if apart else 0)
    fewest = math.gcd(vision.micro_batches, projector.micro_batches, trunk.micro_batches)
    trains = dice.random()
    return Case(
        vision,
        projector,
        trunk,
        schedule=dice.choice(["1f1b", "gpipe"]),
        rounds=dice.choice([0, *(n for n in range(1, fewest + 1) if fewest % n == 0)]),
        clip=dice.choice([0.0, 0.3]),
        masked=dice.random() < 0.5,
        frozen=("vision_encoder",) if trains < 0.2 else ("llm",) if trains < 0.3 else (),
        optimizer=dice.choice(["SGD", "AdamW"]),
        # Twice as many shards as key and value heads: two shards share a head.
        decoder={"kv_heads": 2} if trunk.tp == 4 else {},
    )


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
