"""The sums of `sums`, with a chunk of actions: from the image's middle to where the middle of its strokes lies.

The noise and the time of flow matching follow from the seed and the sample's number, as everything that is drawn
does: so every layout trains on the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch
from own_models.sums import ACTIONS, Sums, images_of_one_size

FLOW = 1
"""Beside seed and number: another stream of draws than the sample's own."""


class Flows:
    """`more` has `actions` and `noise` [B, chunk, ACTIONS], and `time` [B] in 0..1."""

    def __init__(self, sums: Sums, chunk: int) -> None:
        self.sums, self.chunk = sums, chunk

    def at(self, numbers: Iterable[int]) -> Batch:
        wanted = list(numbers)
        batch = self.sums.at(wanted)
        draws = [np.random.default_rng([self.sums.seed, number, FLOW]) for number in wanted]
        noise = np.stack([draw.standard_normal((self.chunk, ACTIONS)) for draw in draws])
        time = np.array([draw.uniform() for draw in draws])
        way = torch.arange(1, self.chunk + 1) / self.chunk
        more = {
            "actions": batch.more["actions"][:, None] * way[:, None],
            "noise": torch.tensor(noise, dtype=torch.float32),
            "time": torch.tensor(time, dtype=torch.float32),
        }
        return replace(batch, more=more)


def chunks(plan: Plan) -> Flows:
    return Flows(images_of_one_size(plan), plan.model["components"]["action_expert"]["tokens"])
