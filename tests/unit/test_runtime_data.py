"""The digits task and the schedule: what every rank must agree on without asking another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest

from dslaunch.errors import ConfigError
from tests.real import plans
from tests.real.parts import need

need("torch", "sklearn")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from dslaunch.runtime.data import (  # noqa: E402
    ACTIONS,
    BINS,
    IGNORE,
    INSTRUCTIONS,
    TEXT_TOKENS,
    WORDS,
    Batch,
    Digits,
    Fitting,
    as_bins,
    micro_batches,
    open_data,
)  # fmt: skip
from dslaunch.runtime.schedule import lr_factor  # noqa: E402

VOCAB = 64
SAMPLES = 1797


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(image=8, channels=1, text_tokens=12, vocab=VOCAB, seed=7)


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([b.images for b in batches]), torch.cat([b.tokens for b in batches])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_step_is_the_same_samples_for_every_number_of_ranks(digits: Digits, world_size: int) -> None:
    alone = joined(micro_batches(digits, 5, 0, plans.plan_for("ddp", world_size=1)))
    plan = plans.plan_for("ddp", world_size=world_size)
    shared = joined(list(chain.from_iterable(micro_batches(digits, 5, r, plan) for r in range(world_size))))
    assert torch.equal(alone[0], shared[0])
    assert torch.equal(alone[1], shared[1])


def test_an_epoch_reads_each_image_once_and_the_next_in_another_order(digits: Digits) -> None:
    first = [digits._pick(number)[0] for number in range(SAMPLES)]
    second = [digits._pick(number)[0] for number in range(SAMPLES, 2 * SAMPLES)]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


def test_another_seed_is_another_order() -> None:
    one, other = (Digits(8, 1, 12, VOCAB, seed).at(range(8)).tokens for seed in (1, 2))
    assert not torch.equal(one, other)


def test_only_action_tokens_are_judged(digits: Digits) -> None:
    batch = digits.at(range(64))
    actions = slice(TEXT_TOKENS - ACTIONS, TEXT_TOKENS)
    assert torch.equal(batch.labels[:, actions], batch.tokens[:, actions])
    assert (batch.labels != IGNORE).sum(dim=1).tolist() == [ACTIONS] * 64
    assert batch.tokens[:, actions].min() >= VOCAB - BINS
    assert batch.tokens[:, TEXT_TOKENS:].eq(0).all()


def test_the_words_decide_what_is_asked_for(digits: Digits) -> None:
    """`mirrored` turns x around and leaves y; `reach` keeps the gripper open, `grasp` gives the class."""
    by_words = dict(zip(INSTRUCTIONS, digits.actions, strict=True))
    plain, mirrored, grasp = (
        by_words[("<start>", verb, "the", "stroke", way)]
        for verb, way in (("reach", "directly"), ("reach", "mirrored"), ("grasp", "directly"))
    )
    moved = abs((BINS - 1 - plain[:, 0]) - mirrored[:, 0])
    assert moved.max() <= 1, "one bin at most: a value on a bin's edge"
    assert (plain[:, 1:] == mirrored[:, 1:]).all()
    assert not plain[:, 3].any()
    assert sorted(set(grasp[:, 3].tolist())) == list(range(1, 11))


def test_bins_spread_over_the_values() -> None:
    import numpy as np

    bins = as_bins(np.linspace(-3.0, 5.0, 1601))
    counts = np.bincount(bins, minlength=BINS)
    assert counts.min() > 90
    assert bins[0] == 0
    assert bins[-1] == BINS - 1


def test_images_are_resized_to_the_tower() -> None:
    batch = Digits(image=28, channels=3, text_tokens=9, vocab=VOCAB, seed=0).at(range(2))
    assert batch.images.shape == (2, 3, 28, 28)
    assert batch.images.min() >= -1.0
    assert batch.images.max() <= 1.0


@pytest.mark.parametrize(
    ("seq_len", "vocab", "message"),
    [(24, VOCAB, "training.seq_len: found 24, of which 16"), (28, 20, "the decoder's vocab is 20")],
)
def test_a_model_that_is_too_small_is_refused(seq_len: int, vocab: int, message: str) -> None:
    components = {**plans.MODEL["components"], "llm": {**plans.LLM, "vocab": vocab}}
    training = replace(plans.training_plan(), seq_len=seq_len)
    plan = plans.plan_for("ddp", training=training, model={**plans.MODEL, "components": components})
    with pytest.raises(ValueError, match=message):
        open_data(plan)


def test_words_are_all_used() -> None:
    assert set(chain.from_iterable(INSTRUCTIONS)) == set(WORDS) - {"<pad>"}


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.25), ("cosine", 3, 1.0), ("cosine", 4, 1.0), ("cosine", 12, 0.55), ("cosine", 20, 0.1),
        ("linear", 12, 0.55), ("linear", 16, 0.325), ("constant", 19, 1.0), ("constant", 1, 0.5),
    ],
)  # fmt: skip
def test_learning_rate(schedule: str, step: int, expected: float) -> None:
    """Peak 1e-3, min_lr 1e-4, four steps of warm-up, twenty in all."""
    training = replace(
        plans.training_plan(steps=20), lr=1e-3, min_lr=1e-4, warmup_steps=4, lr_schedule=schedule
    )
    assert lr_factor(step, training, 1e-3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "step", "expected"),
    [
        ("linear", 1, 0.5), ("linear", 4, 1.0), ("cosine", 10, 1.0), ("linear", 15, 0.55), ("cosine", 15, 0.55),
        ("sqrt", 15, 1 - 0.9 * 0.5**0.5), ("linear", 20, 0.1), ("sqrt", 20, 0.1),
    ],
)  # fmt: skip
def test_a_rate_that_stays_until_the_last_ten_steps(shape: str, step: int, expected: float) -> None:
    training = replace(
        plans.training_plan(steps=20), lr=1e-3, min_lr=1e-4, warmup_steps=4, lr_schedule="wsd", lr_decay_steps=10,
        lr_decay_shape=shape,
    )  # fmt: skip
    assert lr_factor(step, training, 1e-3) == pytest.approx(expected)


class Given:
    """A data set that gives what it is made with."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def at(self, numbers: Iterable[int]) -> Batch:
        return self.batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3, 8, dtype=torch.int64)}, "samples 4 to 5: 2 were asked for, and 3 came"),
        ({"tokens": torch.zeros(2, 999, dtype=torch.int64)}, "999 tokens, and training.seq_len is "),
        ({"images": torch.zeros(0, 1, 8, 8)}, "0 images for 2 samples; vision_encoder takes one each"),
        ({"tokens": torch.full((2, 8), 64)}, "token 64, and the decoder's vocab is 64. Give 0 to 63"),
        ({"tokens": torch.full((2, 8), -200)}, "token -200, and the decoder's vocab is 64"),
        ({"labels": torch.full((2, 8), -1)}, "label -1, .* vocab is 64. Give 0 to 63, and -100 for none"),
    ],
)
def test_what_does_not_fit_the_plan_is_named(change: dict[str, Tensor], message: str, digits: Digits) -> None:
    plan = plans.plan_for("ddp")
    batch = digits.at([4, 5])
    assert Fitting(Given(batch), plan).at([4, 5]) is batch
    with pytest.raises(ConfigError, match=message):
        Fitting(Given(replace(batch, **change)), plan).at([4, 5])


def test_marks_below_0_are_a_module_of_ones_own_to_read(digits: Digits) -> None:
    """LLaVA's own code marks the place of an image by the token -200."""
    components = {**plans.MODEL["components"], "llm": {**plans.LLM, "module": "mine:decoder"}}
    plan = plans.plan_for("ddp", model={**plans.MODEL, "components": components})
    batch = replace(digits.at([4, 5]), tokens=torch.full((2, 8), -200))
    assert Fitting(Given(batch), plan).at([4, 5]) is batch


def test_a_data_set_that_gives_no_batches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans.plan_for("ddp")
    with pytest.raises(ConfigError, match=r"a tuple came. at\(numbers\) gives a Batch"):
        Fitting(Given((1, 2)), plan).at([4, 5])  # type: ignore[arg-type]
    nothing = replace(plan, files=replace(plan.files, data_path="builtins:repr"))
    with pytest.raises(ConfigError, match=r"builtins:repr gives a str. It has to give samples"):
        open_data(nothing)
