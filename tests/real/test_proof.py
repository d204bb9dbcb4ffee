"""The first step proves that a training is distributed as its plan says; each way of breaking it is seen."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("hetero", "ddp", "zero1", "zero3")
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


WAIT_S = 1.0


def straggling(rank: int) -> None:
    """One rank takes longer than the plan's whole step."""
    _waiting(lambda _number: WAIT_S if rank == BROKEN else 0.0)


def slow_at_first(_rank: int) -> None:
    """The first step compiles and allocates."""
    _waiting(lambda number: 0.0 if number else WAIT_S)


def _waiting(seconds: Callable[[int], float]) -> None:
    from dslaunch.runtime.engine_torch import TorchEngine

    step = TorchEngine.step

    def late(self: TorchEngine, number: int) -> Any:
        time.sleep(seconds(number))
        return step(self, number)

    TorchEngine.step = late  # type: ignore[method-assign]


def test_a_parameter_that_differs_ends_the_job_with_its_name(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hetero", spoil=nudge)
    assert set(outcome.statuses) == {1}
    fault = r"llm: parameter parts.llm.embedding.weight \(shard 1\) on rank (1 is not that of rank 3|3 .* 1)\n"
    assert re.search(fault, outcome.output), outcome.output
    assert outcome.output.count("not as planned: after the first step\n") == len(outcome.statuses)
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


SIX = ("cluster.gpus_per_node=2", "strategy.every.micro_batch=16", "training.steps=6")


def test_steps_that_are_slower_than_their_bound_end_the_job(tmp_path: Path) -> None:
    """One rank waits in each step, as one with a slow GPU would."""
    outcome = run(tmp_path, "ddp", *SIX, "watchdog.min_speed=0.9", spoil=straggling)
    assert set(outcome.statuses) == {1}, outcome.output
    fault = re.search(
        r"not as planned: steps 2 to 6 took (\S+) s each \(median\); the plan says (\S+) s: (\d+)% of the planned "
        r"speed; the bound is 90% \(watchdog.min_speed\)\.\n  Look for a slow .* or a lower watchdog.min_speed",
        outcome.output, re.DOTALL,
    )  # fmt: skip
    assert fault, outcome.output
    measured, planned, share = map(float, fault.groups())
    assert measured > WAIT_S
    assert share == pytest.approx(100 * planned / measured, abs=1)
    assert outcome.output.count("not as planned") == len(outcome.statuses)
    assert "Traceback" not in outcome.output


def test_steps_within_their_bound_go_on_and_their_speed_is_said_once(tmp_path: Path) -> None:
    """The first step takes longest, and does not count."""
    outcome = run(tmp_path, "ddp", *SIX, "watchdog.min_speed=0.01", spoil=slow_at_first)
    assert set(outcome.statuses) == {0}, outcome.output
    (share,) = re.findall(r"(\d+)% of the planned speed; the bound is 1% \(watchdog.min_speed\)\n", outcome.output)
    assert int(share) > 1


def test_a_prediction_of_another_plan_is_held_against_nothing(tmp_path: Path) -> None:
    files = dict(rendered(*WORDS, "strategy=ddp", "cluster.gpus_per_node=2", "strategy.every.micro_batch=16"))
    files["plan.json"] = files["plan.json"].replace('"seed": 1234', '"seed": 1235')
    outcome = run_ranks(written(tmp_path / "run", files) / "plan.json", 2, LIMIT_S)
    assert set(outcome.statuses) == {0}, outcome.output
    assert outcome.output.count("no prediction.json of this plan is beside it, so that bytes are held to") == 1
    assert outcome.output.count("no prediction.json of this plan is beside it, so that the speed is held to") == 1


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
