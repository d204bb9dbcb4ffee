"""A small real data set as a vision-language-action task, and which rank reads which sample.

`digits` is scikit-learn's bundled set of 1,797 handwritten digits of 8 x 8 pixels (UCI, Alpaydin and Kaynak
1998). The task is shaped like OpenVLA's (arXiv:2406.09246): an image, an instruction in words, then action
tokens, each one dimension of an action cut into bins between its 1st and 99th percentile, bin b standing at
the end of the vocabulary as token vocab - 1 - b. The loss falls on action tokens alone.

The actions are measured on the image: where the stroke's centre lies (x, y), how far it spreads, and the
gripper's command, which is the digit's class where the instruction says grasp and open (0) where it says
reach. `mirrored` turns x around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.runtime.naming import imported

BINS = 16
ACTIONS = 4
WORDS = ("<pad>", "<start>", "reach", "grasp", "directly", "mirrored", "the", "stroke")
INSTRUCTIONS = tuple(
    ("<start>", verb, "the", "stroke", way) for verb in ("reach", "grasp") for way in ("directly", "mirrored")
)
TEXT_TOKENS = len(INSTRUCTIONS[0]) + ACTIONS
SIDE = 8
BRIGHTEST = 16.0
_OF_TRANSFORMERS = "dslaunch.runtime.hf:"
IGNORE = -100
"""A label that the loss does not fall on."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B samples."""

    images: Tensor
    """[I, channels, image, image], or what else the towers read: those of the first sample, of the second, ..."""
    tokens: Tensor
    """[B, T] int64."""
    labels: Tensor
    """[B, T] int64: the token to be predicted in each place, and -100 where there is none."""
    counts: Tensor | None = None
    """[B] int64: how many images each sample has; None: one."""
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """What else a model's modules read, by name."""

    @property
    def image_count(self) -> Tensor:
        """How many images its samples have together."""
        return torch.tensor(len(self.images)) if self.counts is None else self.counts.sum()

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device),
            self.tokens.to(device),
            self.labels.to(device),
            None if self.counts is None else self.counts.to(device),
            {name: tensor.to(device) for name, tensor in self.more.items()},
        )


class Samples(Protocol):
    """A data set."""

    def at(self, numbers: Iterable[int]) -> Batch:
        """Samples by number in an endless stream, in this order: the same on every rank and for every layout."""
        ...


class Fitting:
    """A data set, every micro-batch of which is held to the plan: what does not fit is named."""

    def __init__(self, data: Samples, plan: Plan) -> None:
        specs = plan.model["components"]
        self._data, self._most = data, plan.training.seq_len
        decoder = next(spec for spec in specs.values() if spec["arch"] == "decoder")
        self._vocab = decoder["vocab"]
        own = decoder.get("module") or ""
        self._marks = bool(own) and not own.startswith(_OF_TRANSFORMERS)
        """Whether a module of the user's reads tokens and labels, which may hold marks of its own below 0."""
        self._towers = [name for name, spec in specs.items() if spec["arch"] == "vit" and not spec.get("module")]

    def at(self, numbers: Iterable[int]) -> Batch:
        """Raises ConfigError for a micro-batch that the model cannot take."""
        wanted = list(numbers)
        batch = self._data.at(wanted)
        if fault := self._fault(batch, len(wanted)):
            raise ConfigError(f"data.path: samples {wanted[0]} to {wanted[-1]}: {fault}")
        return batch

    def _fault(self, batch: Batch, samples: int) -> str:
        if not isinstance(batch, Batch):
            return f"a {type(batch).__name__} came. at(numbers) gives a Batch (dslaunch.runtime.data)."
        rows, length = batch.tokens.shape
        if rows != samples:
            return f"{samples} were asked for, and {rows} came. Give as many as there are numbers."
        if length > self._most:
            return f"{length} tokens, and training.seq_len is {self._most}. Cut them, or plan with more."
        if self._towers and len(batch.images) != samples:
            return (
                f"{len(batch.images)} images for {samples} samples; {self._towers[0]} takes one each. For several "
                f"or none name a tower of transformers' in model.components.{self._towers[0]}.module."
            )
        return self._beyond("token", batch.tokens, 0) or self._beyond("label", batch.labels[:, 1:], IGNORE)

    def _beyond(self, what: str, numbers: Tensor, none: int) -> str:
        """The first number beyond the vocabulary: where that is cut, it would be taken for nothing, in silence.

        Args:
            none: the number that stands for none.
        """
        strange = [
            number
            for number in sorted(set(numbers.flatten().tolist()))
            if number >= self._vocab or (number < 0 and number != none and not self._marks)
        ]
        also = f", and {none} for none" if none else ""
        return (
            f"{what} {strange[0]}, and the decoder's vocab is {self._vocab}. Give 0 to {self._vocab - 1}{also}."
            if strange
            else ""
        )


class Digits:
    """The data set, and the order in which it is read: a function of seed and sample number alone."""

    def __init__(self, image: int, channels: int, text_tokens: int, vocab: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        pixels, classes = load_digits(return_X_y=True)
        strokes = pixels.reshape(-1, SIDE, SIDE)
        self.images = as_images(strokes, image, channels)
        self.actions = np.stack([as_actions(strokes, classes, words) for words in INSTRUCTIONS])
        self.text_tokens, self.vocab, self.seed = text_tokens, vocab, seed

    def at(self, numbers: Iterable[int]) -> Batch:
        """Samples by number in the endless stream: one permutation after another."""
        picks = [self._pick(number) for number in numbers]
        rows = [self._tokens(which, instruction) for which, instruction in picks]
        tokens = torch.tensor(rows)
        labels = torch.full_like(tokens, IGNORE)
        actions = slice(TEXT_TOKENS - ACTIONS, TEXT_TOKENS)
        labels[:, actions] = tokens[:, actions]
        return Batch(self.images[[which for which, _ in picks]], tokens, labels)

    def _pick(self, number: int) -> tuple[int, int]:
        """The image and the instruction of sample `number`."""
        epoch, position = divmod(number, len(self.images))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
        instruction = np.random.default_rng([self.seed, epoch, position]).integers(len(INSTRUCTIONS))
        return int(order[position]), int(instruction)

    def _tokens(self, which: int, instruction: int) -> list[int]:
        words = [WORDS.index(word) for word in INSTRUCTIONS[instruction]]
        actions = [self.vocab - 1 - int(b) for b in self.actions[instruction, which]]
        row = words + actions
        return row + [WORDS.index("<pad>")] * (self.text_tokens - len(row))


def open_data(plan: Plan) -> Samples:
    """The data set that `data.path` names: `digits`, or what the function `package.module:name` gives for `plan`.

    Raises:
        ConfigError: an unknown data set, or a model that it does not suit.
    """
    if ":" in plan.files.data_path:
        made: Samples = imported(plan.files.data_path, "data.path")(plan)
        if not hasattr(made, "at"):
            raise ConfigError(
                f"data.path: {plan.files.data_path} gives a {type(made).__name__}. It has to give samples: an "
                "object with at(numbers) -> Batch (dslaunch.runtime.data)."
            )
        return made
    return open_digits(plan)


def open_digits(plan: Plan) -> Digits:
    """The handwritten digits, for the model of `plan`; ConfigError where it does not suit."""
    if plan.files.data_path != "digits":
        raise ConfigError(
            f"data.path: found '{plan.files.data_path}'; dslaunch.runtime reads `digits` (scikit-learn's "
            "handwritten digits), or what a function of yours gives: data.path=package.module:function. Or give a "
            "training script: script=PATH."
        )
    if plan.files.tokenizer:
        raise ConfigError(
            f"data.tokenizer: found '{plan.files.tokenizer}', but `digits` has its own words. Leave it empty."
        )
    specs = plan.model["components"].values()
    towers = {(spec["image"], spec["channels"]) for spec in specs if spec["arch"] == "vit"}
    if len(towers) != 1:
        raise ConfigError(
            f"data.path: `digits` gives one image of one size; the towers take {sorted(towers) or 'none'} "
            "(pixels, channels)."
        )
    vocab = next(spec["vocab"] for spec in specs if spec["arch"] == "decoder")
    length, before = plan.training.seq_len, image_tokens(plan)
    text = length - before
    if text < TEXT_TOKENS:
        raise ConfigError(
            f"training.seq_len: found {length}, of which {before} are image tokens; `digits` needs "
            f"{TEXT_TOKENS} text tokens. Set it to {before + TEXT_TOKENS} or more."
        )
    if vocab < len(WORDS) + BINS:
        raise ConfigError(f"model: the decoder's vocab is {vocab}; `digits` needs {len(WORDS) + BINS}.")
    image, channels = towers.pop()
    return Digits(image, channels, text, vocab, plan.training.seed)


def image_tokens(plan: Plan) -> int:
    """Tokens per sample that stand before the text."""
    decoders = {name for name, spec in plan.model["components"].items() if spec["arch"] == "decoder"}
    return sum(edge["tokens"] for edge in plan.model["edges"] if edge["to"] in decoders)


def micro_batches(data: Samples, step: int, rank: int, plan: Plan) -> list[Batch]:
    """The micro-batches of `rank` in optimizer step `step` (from 0).

    The global batch of a step is the same samples for every number of ranks; rank r reads its r-th block.
    """
    layout = next(iter(plan.components.values()))
    share = layout.micro_batch * layout.num_microbatches
    first = step * plan.global_batch + rank * share
    starts = range(first, first + share, layout.micro_batch)
    return [data.at(range(start, start + layout.micro_batch)) for start in starts]


def as_images(strokes: NDArray[np.float64], image: int, channels: int) -> Tensor:
    """Strokes [n, 8, 8] as images [n, channels, image, image] in -1..1."""
    scaled = torch.tensor(strokes / BRIGHTEST * 2.0 - 1.0, dtype=torch.float32)[:, None]
    return F.interpolate(scaled, size=(image, image), mode="bilinear").expand(-1, channels, -1, -1)


def as_actions(
    strokes: NDArray[np.float64], classes: NDArray[np.int64], words: tuple[str, ...]
) -> NDArray[np.int64]:
    """The action bins [n, 4] that the instruction `words` asks for: x, y, spread, gripper."""
    mass = strokes.sum(axis=(1, 2))
    across = np.arange(SIDE)
    x = (strokes.sum(axis=1) * across).sum(axis=1) / mass
    y = (strokes.sum(axis=2) * across).sum(axis=1) / mass
    distance2 = (across - x[:, None])[:, None, :] ** 2 + (across - y[:, None])[:, :, None] ** 2
    spread = np.sqrt((strokes * distance2).sum(axis=(1, 2)) / mass)
    if "mirrored" in words:
        x = SIDE - 1 - x
    gripper = classes + 1 if "grasp" in words else np.zeros_like(classes)
    return np.stack([as_bins(x), as_bins(y), as_bins(spread), gripper], axis=1)


def as_bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bins 0..15 of equal width between the 1st and the 99th percentile."""
    low, high = np.quantile(values, [0.01, 0.99])
    bins: NDArray[np.int64] = np.clip((values - low) / (high - low) * BINS, 0, BINS - 1).astype(np.int64)
    return bins
