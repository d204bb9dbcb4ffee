"""The host memory of DeepSpeed's offload, held against the tensors that its optimizers have after steps."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dslaunch.planfile import prediction_from_json
from tests.golden.cases import rendered, written
from tests.real.parts import need
from tests.real.ranks import run_ranks

need("torch", "deepspeed", "sklearn")

WORLD = 2
WORDS = (
    "recipe=vla_tiny", "cluster=local", f"cluster.gpus_per_node={WORLD}", "training.precision=bf16",
    "training.optimizer.warmup_steps=1", "training.global_batch=32", "strategy.every.micro_batch=8",
    "training.steps=2", "strategy.every.offload=cpu",
)  # fmt: skip


def held(optimizer: Any, stage: int) -> int:
    """Bytes of an optimizer's tensors that are in host memory where the device is a GPU."""
    if stage < 3:
        masters = optimizer.single_partition_of_fp32_groups
        on_gpu, on_host = optimizer.temp_grad_buffer_for_gpu_offload, optimizer.temp_grad_buffer_for_cpu_offload
        assert on_gpu.nbytes == on_host.nbytes  # the ledger of the GPU has one too: host_memory.one_gradient
        beside = [
            *optimizer.param_buffer_of_bit16_for_cpu_offload_groups,
            *optimizer.accumulated_grads_in_cpu.values(),
            optimizer.temp_grad_buffer_for_cpu_offload,
        ]
    else:
        masters = optimizer.fp32_partitioned_groups_flat
        beside = [optimizer.grad_partitions_flat_buffer]
    states = [optimizer.optimizer.state[master] for master in masters]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    gradients = [master.grad for master in masters]
    return sum(tensor.nbytes for tensor in (*masters, *moments, *gradients, *beside))


def count(folder: Path, stage: int, rank: int) -> None:
    """Rank 0 writes what each optimizer holds after its last step."""
    if stage < 3:
        kind: Any = import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    else:
        kind = import_module("deepspeed.runtime.zero.stage3").DeepSpeedZeroOptimizer_Stage3
    true, bytes_of = kind.step, {}

    def step(self: Any, *args: Any, **named: Any) -> Any:
        found = true(self, *args, **named)
        if rank == 0:
            bytes_of[id(self)] = held(self, stage)
            (folder / "held.json").write_text(json.dumps(list(bytes_of.values())))
        return found

    kind.step = step


@pytest.mark.parametrize(
    ("stage", "added_up_in"),
    [(2, "bf16"), pytest.param(2, "fp32", marks=pytest.mark.slow), (3, "fp32")],
)
def test_the_ledger_counts_what_deepspeed_keeps(stage: int, added_up_in: str, tmp_path: Path) -> None:
    words, folder = (f"strategy=zero{stage}", f"training.grad_accum_dtype={added_up_in}"), tmp_path / "run"
    written(folder, rendered(*WORDS, *words))
    outcome = run_ranks(folder / "plan.json", WORLD, spoil=partial(count, folder, stage))
    assert outcome.statuses == [0] * WORLD, outcome.output
    prediction = prediction_from_json((folder / "prediction.json").read_text(), "prediction.json")
    predicted = sum(stages[0].host_gib_per_rank for stages in prediction.components.values()) * 2**30
    assert sum(json.loads((folder / "held.json").read_text())) == pytest.approx(predicted, rel=0.02)
