"""A freeze schedule is one run after another: each goes on from the one before, and trains other components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import run_ranks

need("torch", "deepspeed", "sklearn")

WORDS = (
    "recipe=vla_tiny", "cluster=local", "cluster.gpus_per_node=2", "training.optimizer.warmup_steps=0",
    "training.optimizer.schedule=constant", "strategy.every.micro_batch=8", "checkpoint.every=2",
    "training.optimizer.lr=1e-2",
)  # fmt: skip
NATIVE = ("engine=native", "strategy=zero1")
TOWER = "model.components.vision_encoder.train=nothing"
REL = 1e-5


def trained(folder: Path, *words: str) -> list[float]:
    """The losses of a run."""
    outcome = run_ranks(written(folder, rendered(*WORDS, *words)) / "plan.json", 2)
    assert outcome.statuses == [0, 0], outcome.output
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tower(checkpoint: Path) -> torch.Tensor:
    from dslaunch.runtime.held import WEIGHT
    from dslaunch.runtime.store import Source

    source = Source(checkpoint)
    names = sorted(name for name in source.tensors if name.startswith("parts.vision_encoder."))
    return torch.cat([source.whole(name, WEIGHT).reshape(-1) for name in names])


def test_what_was_trained_and_is_frozen_now_stays_what_it_was(tmp_path: Path) -> None:
    """All, then all but the tower, whose own checkpoint another strategy goes on from."""
    every = trained(tmp_path / "all", *NATIVE, "training.steps=3")
    before = tmp_path / "all" / "checkpoints" / "step-00000002"
    frozen = trained(tmp_path / "frozen", *NATIVE, "training.steps=5", TOWER, f"checkpoint.load={before}")
    assert frozen[0] == every[2]
    after = tmp_path / "frozen" / "checkpoints" / "step-00000004"
    assert torch.equal(tower(after), tower(before))
    rest = trained(tmp_path / "rest", "strategy=ddp", "training.steps=5", TOWER, f"checkpoint.load={after}")
    assert rest == pytest.approx(frozen[2:], rel=REL)
    last = tmp_path / "rest" / "checkpoints" / "step-00000005"
    assert torch.equal(tower(last), tower(before))
