"""Memory of PyTorch's and Hugging Face's programs: against published runs, and moment by moment."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.predict import peak_gib, predict
from benchmarks.records import Record, published
from benchmarks.settings import setting
from dslaunch.plan.memory import reserved_gib, stage_memory

RUNS = {record.id: record for record in published()}


def changed(name: str, **values: Any) -> Record:
    """A published run with other settings."""
    return RUNS[name].model_copy(update=values)


def memory(record: Record) -> Any:
    (case,) = setting(record).cases.values()
    return stage_memory(case, 0)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("torchtitan-l3-8b-fsdp8-eager", 0.04),
        ("torchtitan-l3-8b-fsdp128-compile", 0.03),
        ("torchtitan-l3-8b-fsdp1-cp8-s262144", 0.03),
        ("torchtitan-l3-8b-b200x8-bf16", 0.03),
        ("torchtitan-llama3-8b-fsdp4-mb32-bf16", 0.04),
        ("torchtune-llama3.2-3b-packed", 0.03),
        ("torchtune-llama3.2-3b-AC", 0.03),
        ("torchtune-llama3.2-3b-optbwd", 0.03),
        ("torchtune-llama3.2-3b-qlora", 0.05),
        ("msswift-v2-qwen-14b-lora-len2048", 0.04),
        ("qwen-7b-lora-s8192", 0.06),
        ("alst-h100-sp32-llama-70b", 0.06),
    ],
)
def test_published_peak(name: str, within: float) -> None:
    record = RUNS[name]
    gib = record.measured.peak_memory_gb
    assert gib is not None
    measured = gib if record.measured.peak_memory_unit == "GiB" else gib / 1.073741824
    assert predict(record).peak_memory_gib == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("torchtitan-llama2-70b-a100x64-so1", True), ("torchtitan-llama2-70b-a100x64-so2-OOM", False)],
)
def test_what_ran_out_of_memory_does_not_fit(name: str, fits: bool) -> None:
    assert predict(RUNS[name]).fits is fits


def test_gradients_wait_for_the_loss_only_where_micro_batches_are_accumulated() -> None:
    once = RUNS["torchtitan-l3-8b-fsdp8-compile"]
    assert memory(once).gradients == 0
    assert memory(once).logits > 0
    again = changed(once.id, global_batch=4 * 16)
    assert memory(again).gradients == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=0.01)


def test_other_streams_reserve_gradients_beside_what_is_allocated() -> None:
    run = setting(RUNS["torchtitan-l3-8b-fsdp8-compile"])
    (case,) = run.cases.values()
    gradients = 8.03e9 * 4 / 8 / 2**30
    assert reserved_gib(case, 0) > stage_memory(case, 0).total + gradients


def test_lengths_that_vary_leave_blocks_behind_up_to_the_gpu() -> None:
    record = RUNS["msswift-v2-qwen-14b-lora-len2048"]
    even = changed(record.id, software={"varying_lengths": False})
    assert peak_gib(setting(record), "reserved") > peak_gib(setting(even), "reserved") + 5
    longest = peak_gib(setting(RUNS["msswift-v2-qwen-14b-full-len8192"]), "reserved")
    assert longest == pytest.approx(80 - 1.57)


def test_a_chunked_loss_takes_less_than_a_compiled_one_and_that_less_than_single_operations() -> None:
    name = "torchtitan-l3-8b-fsdp8-compile"
    plain, fused, chunked = (
        memory(changed(name, software={"loss": loss})).logits for loss in ("plain", "fused", "chunked")
    )
    assert plain > 2.5 * fused > 2.5 * 2 * chunked > 0


def test_offloaded_weights_of_fsdp_are_on_the_host() -> None:
    name = "fsdpqlora-llama2-7b-lora-rtx4090-bs6-c2048-fsdp"
    assert memory(RUNS[name]).weights > 6
    away = memory(changed(name, offload="params->cpu"))
    assert (away.weights, away.optimizer) == (0, 0)


def test_gradients_that_are_reduced_once_a_step_are_whole_until_then() -> None:
    """Four micro-batches under FSDP: 8.03e9 parameters in fp32, beside what each rank has of them sharded."""
    run = changed("torchtitan-l3-8b-fsdp8-compile", global_batch=4 * 16)
    late = Record.model_validate(run.model_dump() | {"software": {"whole_gradients": True}})
    more = memory(late).total - memory(run).total
    assert more == pytest.approx(8.03e9 * 4 / 2**30, rel=0.01)
    once = Record.model_validate(late.model_dump() | {"global_batch": 16})
    assert memory(once).total == memory(changed(run.id, global_batch=16)).total


def test_gathered_logits_are_not_shared_by_the_ranks_of_a_tp_group() -> None:
    run = changed("torchtitan-l3-8b-fsdp8-compile", tp=2, dp=4, global_batch=8)
    whole = Record.model_validate(run.model_dump() | {"software": {"gathered_logits": True}})
    alone = changed(run.id, global_batch=16)
    assert memory(whole).logits == pytest.approx(memory(alone).logits, rel=0.02)
    assert memory(run).logits < 0.7 * memory(whole).logits
