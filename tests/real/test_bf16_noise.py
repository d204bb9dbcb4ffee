"""In bf16 a layout for each component learns as one process does in fp32, within what another seed changes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import run_ranks

need("torch", "deepspeed", "sklearn")

STEPS = 30
SEEDS = (1234, 1, 2, 3, 4)
"""The first one is the one that is compared."""
LIMIT_S = 240.0
WORDS = ("recipe=vla_tiny", "cluster=local", f"training.steps={STEPS}", "training.optimizer.warmup_steps=1")
ALONE = ("cluster.gpus_per_node=1", "strategy=zero0", "strategy.every.micro_batch=32", "training.precision=fp32")


def curve(folder: Path, ranks: int, *words: str) -> list[float]:
    outcome = run_ranks(written(folder, rendered(*WORDS, *words)) / "plan.json", ranks, LIMIT_S)
    assert outcome.statuses == [0] * ranks, outcome.output
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def apart(one: list[float], other: list[float]) -> float:
    """Root of the mean squared difference."""
    return statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5


@pytest.mark.slow
def test_bf16_is_within_the_noise_of_seeds(tmp_path: Path) -> None:
    """Half the learning rate is not, by which one sees that the noise is no licence."""
    by_seed = [curve(tmp_path / str(seed), 1, *ALONE, f"training.seed={seed}") for seed in SEEDS]
    exact = by_seed[0]
    noise = statistics.fmean(statistics.stdev(losses) for losses in zip(*by_seed, strict=True))
    found = curve(tmp_path / "bf16", 8, "strategy=hetero", "training.precision=bf16")
    slower = curve(tmp_path / "slower", 1, *ALONE, "training.optimizer.lr=1.5e-3")
    told = f"noise {noise:.4f}, bf16 {apart(found, exact):.4f}, half the rate {apart(slower, exact):.4f}"
    assert found != exact
    assert apart(found, exact) < noise < apart(slower, exact), told
    print(told)
