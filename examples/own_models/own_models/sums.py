"""Add up handwritten digits: a sample has two images, one or none; its answer is a token, its action a place.

The images are scikit-learn's 1,797 digits. Sample number n is the same on every rank and for every layout: what is
drawn follows from the seed and n alone.

    <start> <image> ... <image> = 11 <pad> ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.runtime.data import IGNORE, Batch

PAD, START, EQUALS, IMAGE, ZERO = range(5)
"""Numbers of tokens; ZERO + n is the answer n."""
MOST_IMAGES = 2
ACTIONS = 2
BRIGHTEST = 16.0
SIDES = (4, 8, 12)
"""Of images for a tower that takes any size, pixels."""


@dataclass(frozen=True)
class Sample:
    """One sum."""

    digits: list[Tensor]
    """Each [3, height, width] in -1..1."""
    answer: int
    action: list[float]
    """Where the strokes' middle lies on the first image, -1..1 across and down; 0 without an image."""


class Sums:
    """Images of one size: `images` [I, 3, side, side]."""

    def __init__(self, seed: int, length: int, side: int, per_image: int) -> None:
        from sklearn.datasets import load_digits

        pixels, self.classes = load_digits(return_X_y=True)
        self.strokes = torch.tensor(pixels / BRIGHTEST, dtype=torch.float32).view(-1, 1, 8, 8)
        self.seed, self.length, self.side, self.per_image = seed, length, side, per_image

    def at(self, numbers: Iterable[int]) -> Batch:
        samples = [self.sample(number) for number in numbers]
        tokens = torch.tensor([self.tokens(sample) for sample in samples])
        answers = F.pad((tokens == EQUALS)[:, :-1], (1, 0))
        counts = torch.tensor([len(sample.digits) for sample in samples])
        images, more = self.packed([digit for sample in samples for digit in sample.digits])
        more["actions"] = torch.tensor([sample.action for sample in samples])
        return Batch(images, tokens, tokens.where(answers, IGNORE), counts, more)

    def sample(self, number: int) -> Sample:
        draw = np.random.default_rng([self.seed, number])
        picks = draw.integers(len(self.strokes), size=draw.integers(MOST_IMAGES + 1))
        digits = [self.picture(self.strokes[pick], draw) for pick in picks]
        return Sample(digits, int(self.classes[picks].sum()), self.middle(picks[:1]))

    def picture(self, stroke: Tensor, _draw: np.random.Generator) -> Tensor:
        return resized(stroke, self.side, self.side)

    def middle(self, picks: np.ndarray) -> list[float]:
        if not len(picks):
            return [0.0] * ACTIONS
        stroke, along = self.strokes[int(picks[0]), 0], torch.linspace(-1, 1, 8)
        across, down = stroke.sum(dim=0) @ along, stroke.sum(dim=1) @ along
        return [float(across / stroke.sum()), float(down / stroke.sum())]

    def tokens(self, sample: Sample) -> list[int]:
        row = [START]
        for digit in sample.digits:
            row += [IMAGE] * self.tokens_of(digit) + [START]
        row += [EQUALS, ZERO + sample.answer]
        return row + [PAD] * (self.length - len(row))

    def tokens_of(self, _digit: Tensor) -> int:
        return self.per_image

    def packed(self, digits: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.stack(digits) if digits else torch.zeros(0, 3, self.side, self.side), {}


class SumsOfAnySize(Sums):
    """Images of several sizes, as Qwen2.5-VL's processor gives them: rows of patches, and each image's grid."""

    patch, merge, frames = 2, 2, 2

    def picture(self, stroke: Tensor, draw: np.random.Generator) -> Tensor:
        height, width = draw.choice(SIDES, size=2)
        return resized(stroke, int(height), int(width))

    def tokens_of(self, digit: Tensor) -> int:
        return digit.shape[1] * digit.shape[2] // (self.patch * self.merge) ** 2

    def packed(self, digits: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        grids = [[1, d.shape[1] // self.patch, d.shape[2] // self.patch] for d in digits]
        rows = [self.patches(digit) for digit in digits]
        width = 3 * self.frames * self.patch**2
        images = torch.cat(rows) if rows else torch.zeros(0, width)
        return images, {"image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3)}

    def patches(self, image: Tensor) -> Tensor:
        """[3, h, w] -> [patches, 3 * frames * patch * patch], group after group of merge * merge neighbours."""
        p, m = self.patch, self.merge
        split = image.view(3, image.shape[1] // (m * p), m, p, image.shape[2] // (m * p), m, p)
        rows = split.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).repeat(1, 1, 1, 1, 1, self.frames, 1, 1)
        return rows.reshape(-1, 3 * self.frames * p * p)


def resized(stroke: Tensor, height: int, width: int) -> Tensor:
    """[1, 8, 8] in 0..1 -> [3, height, width] in -1..1."""
    picture = F.interpolate(stroke[None], size=(height, width), mode="bilinear")[0]
    return picture.expand(3, -1, -1) * 2.0 - 1.0


def images_of_one_size(plan: Plan) -> Sums:
    tower = plan.model["components"]["vision_encoder"]
    per_image = (tower["image"] // tower["patch"]) ** 2
    _check_length(plan.training.seq_len, per_image)
    return Sums(plan.training.seed, plan.training.seq_len, tower["image"], per_image)


def images_of_any_size(plan: Plan) -> SumsOfAnySize:
    most = (max(SIDES) // (SumsOfAnySize.patch * SumsOfAnySize.merge)) ** 2
    _check_length(plan.training.seq_len, most)
    return SumsOfAnySize(plan.training.seed, plan.training.seq_len, max(SIDES), most)


def _check_length(found: int, per_image: int) -> None:
    needed = MOST_IMAGES * (per_image + 1) + 3
    if found < needed:
        raise ConfigError(f"training.seq_len: found {found}. Set it to {needed} or more: so long is a sum.")
