"""Samples with several images, one or none: rows by image, and rows by sample with room for the most images."""

from __future__ import annotations

import torch
from torch import Tensor

from dslaunch.errors import ConfigError


def counts_of(counts: Tensor | None, images: int, samples: int, most: int, where: str) -> Tensor:
    """Images by sample [B].

    Raises:
        ConfigError: a sample has more than `most`, or the images are not as many as the counts say.
    """
    if counts is None:
        counts = torch.ones(samples, dtype=torch.int64)
    if int(counts.max()) > most:
        raise ConfigError(
            f"data: a sample has {int(counts.max())} images; {where}.passes is {most}. Set it to the most that a "
            "sample has, and the edges' tokens with it."
        )
    if int(counts.sum()) != images:
        raise ConfigError(f"data: a micro-batch has {images} images, and its counts say {int(counts.sum())}.")
    return counts


def places(counts: Tensor, most: int) -> Tensor:
    """Which of `most` places of each sample hold an image: [B * most], bool."""
    return (torch.arange(most, device=counts.device) < counts[:, None]).flatten()


def by_sample(rows: Tensor, held: Tensor, most: int) -> Tensor:
    """[I, N, H] -> [B, most * N, H]: zeros where a sample has fewer images.

    `rows` may be of one image that no sample has: then all are zeros, which depend on it.
    """
    room = rows.new_zeros(len(held), *rows.shape[1:])
    if not held.any():
        return (room + 0.0 * rows.sum()).view(-1, most * rows.shape[1], rows.shape[2])
    room = room.index_put((held.nonzero()[:, 0],), rows)
    return room.view(-1, most * rows.shape[1], rows.shape[2])


def by_image(x: Tensor, held: Tensor) -> Tensor:
    """[B, most * N, H] -> [I, N, H]; the first place, empty, where no sample has an image."""
    rows = x.reshape(len(held), -1, x.shape[2])
    return rows[held] if held.any() else rows[:1]
