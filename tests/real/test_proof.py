"""The first step proves that a training is distributed as its plan says; each way of breaking it is seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import Outcome, run_ranks

need("torch", "deepspeed", "sklearn")

WORDS = ("recipe=vla_tiny", "cluster=local", "training.steps=2", "training.optimizer.warmup_steps=1")
LIMIT_S = 240.0
BROKEN = 1


def run(folder: Path, strategy: str, *words: str, spoil: Callable[[int], None] | None = None) -> Outcome:
    files = rendered(*WORDS, f"strategy={strategy}", *words)
    ranks = json.loads(files["plan.json"])["world_size"]
    return run_ranks(written(folder / "run", files) / "plan.json", ranks, LIMIT_S, spoil)


@pytest.mark.parametrize("strategy", ["hetero", "zero2", "fsdp2", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero3")
)])  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_what_was_proved_is_said_once(strategy: str, precision: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, strategy, f"training.precision={precision}")
    assert set(outcome.statuses) == {0}, outcome.output
    assert outcome.output.count(", gradient norms equal, weights and optimizer states within ") == 1
    sharded = strategy in ("zero3", "fsdp2")
    assert ("no parameter has replicas" if sharded else "parameters equal on all their replicas") in outcome.output
    assert outcome.output.count("of the ledger's") == 1
    assert outcome.output.count("of the planned speed") == 1


def nudge(rank: int) -> None:
    """One rank's copy of a parameter is another after the first step."""
    import torch

    from dslaunch.runtime.engine_native import NativeEngine

    step = NativeEngine.step

    def nudged(self: NativeEngine, number: int) -> object:
        result = step(self, number)
        for (name, _), stage in self.stages.items():
            if name == "llm" and rank == BROKEN:
                with torch.no_grad():
                    next(stage.module.parameters()).flatten()[0].add_(1e-6)
        return result

    NativeEngine.step = nudged  # type: ignore[method-assign,assignment]


def no_reduction(_rank: int) -> None:
    """Gradients are not averaged over replicas: every rank trains a model of its own."""
    from torch.nn.parallel import DistributedDataParallel

    forward = DistributedDataParallel.forward

    def alone(self: DistributedDataParallel, *args: object, **more: object) -> object:
        self.require_backward_grad_sync = False
        return forward(self, *args, **more)

    DistributedDataParallel.forward = alone  # type: ignore[method-assign]


def other_norm(rank: int) -> None:
    """One rank reckons its norm from other gradients."""
    from dslaunch.runtime import engine_native

    true = engine_native.squared_norm
    engine_native.squared_norm = lambda *args: true(*args) * (1.5 if rank == BROKEN else 1.0)


def test_a_parameter_that_differs_ends_the_job_with_its_name(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hetero", spoil=nudge)
    assert set(outcome.statuses) == {1}
    fault = r"llm: parameter parts.llm.embedding.weight \(shard 1\) on rank (1 is not that of rank 3|3 .* 1)\n"
    assert re.search(fault, outcome.output), outcome.output
    assert outcome.output.count("after the first step") == 1
    assert "Traceback" not in outcome.output


def test_replicas_that_were_not_reduced_are_seen(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ddp", spoil=no_reduction)
    assert set(outcome.statuses) == {1}
    for component in ("vision_encoder", "projector", "llm"):
        assert f"{component}: parameter parts.{component}." in outcome.output
    assert "model: the gradient's norm is " in outcome.output


def test_a_norm_that_differs_is_seen(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hetero", spoil=other_norm)
    assert set(outcome.statuses) == {1}
    assert "llm, stage0: the gradient's norm is " in outcome.output
    assert f"on rank {BROKEN}" in outcome.output


def test_states_that_are_not_sharded_are_seen(tmp_path: Path) -> None:
    """The plan says ZeRO-2, and somebody's hand-edited DeepSpeed file 0."""
    files = dict(rendered(*WORDS, "strategy=zero2"))
    config = json.loads(files["ds_config.json"])
    config["zero_optimization"] = {"stage": 0}
    files["ds_config.json"] = json.dumps(config)
    ranks = json.loads(files["plan.json"])["world_size"]
    outcome = run_ranks(written(tmp_path / "run", files) / "plan.json", ranks, LIMIT_S)
    assert set(outcome.statuses) == {1}, outcome.output
    assert "llm: rank 0 holds " in outcome.output
    assert "GiB of weights and optimizer states; the ledger says " in outcome.output
