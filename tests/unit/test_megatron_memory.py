"""Megatron's memory ledger against measured peaks whose every flag is known."""

from __future__ import annotations

from functools import lru_cache

import pytest

from benchmarks.errors import measured_gib
from benchmarks.predict import predict
from benchmarks.records import Record, published

CI = "mcore-ci-gpt-gpt3_"


@lru_cache(maxsize=1)
def records() -> dict[str, Record]:
    return {record.id: record for record in published()}


def error(name: str) -> float:
    record = records()[name]
    measured, predicted = measured_gib(record), predict(record).peak_memory_gib
    assert measured is not None
    assert predicted is not None
    return predicted / measured - 1


@pytest.mark.parametrize(
    "name",
    [
        CI + "mcore_te_tp1_pp1_dist_optimizer_fim_dataset-dev_dgx_h100",
        CI + "mcore_te_tp1_pp2_rope_embeddings-dev_dgx_a100",
        CI + "mcore_te_tp1_pp4_disable_bias_linear-dev_dgx_a100",
        CI + "mcore_te_tp1_pp4_vp1-dev_dgx_a100",
        CI + "mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce-dev_dgx_a100",
        CI + "mcore_te_tp1_pp4_vp1_uneven_pipeline-dev_dgx_h100",
        CI + "mcore_te_tp2_pp2-dev_dgx_a100",
        CI + "mcore_te_tp2_pp1_multi_dist_optimizer_instances-dev_dgx_a100",
        CI + "mcore_te_tp2_pp2_mla-dev_dgx_gb200",
        CI + "7b_tp1_pp4_memory_speed-dev_dgx_h100",
        CI + "7b_tp4_pp1_memory_speed-dev_dgx_a100",
    ],
)
def test_dense_runs_of_megatrons_own_tests_within_one_percent(name: str) -> None:
    """Unfused and fused attention, dropout, TP, PP, interleaving, both optimizers, GQA, latent attention."""
    assert abs(error(name)) < 0.01


@pytest.mark.parametrize(
    "name",
    [
        "20b-g8-dp1tp8pp1-mb1", "20b-g8-dp1tp8pp1-mb1-2", "18b-g8-dpNonetp8pp1-mb2", "18b-g8-dpNonetp8pp1-mb1",
        "203b-g384-dp8tp4pp12-mb2", "176b-g384-dp8tp4pp12-mb2", "184b-g384-dp8tp8pp6-mb4",
    ],
)  # fmt: skip
def test_deepspeeds_copies_of_gradients_are_counted(name: str) -> None:
    """BLOOM's trials: a shard's gradients joined and copied to fp32, or all of them reduced in 16 bits as one."""
    assert abs(error(f"bigscience-{name}")) < 0.04


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_stage_that_ran_out_of_memory_reducing_does_not_fit(micro_batch: int) -> None:
    record = records()[f"bigscience-184b-g384-dp16tp4pp6-mb{micro_batch}"]
    assert record.measured.oom
    assert predict(record).fits is False


def test_layers_in_host_memory_keep_nothing_on_the_gpu() -> None:
    """Llama 3 70B: 40 of 80 layers' activations wait in host memory."""
    record = records()["mbridge-26.02-llama-3-70b-pretrain-gb200-fp8-g64-gbs256-tp1pp1cp1epNone"]
    software = {**(record.model_extra or {})["software"], "offloaded_layers": 0}
    there = record.model_copy(update={"software": software})
    half, whole = predict(record).peak_memory_gib, predict(there).peak_memory_gib
    assert half is not None
    assert whole is not None
    assert half < 0.7 * whole


def test_simumax_rows_within_its_own_error() -> None:
    """TP, PP, CP, EP of Llama 70B and 405B and of DeepSeek V2 and V3: SimuMax itself is within 1.4 %."""
    rows = [name for name in records() if name.startswith("simumax-")]
    assert len(rows) == 43
    assert max(abs(error(name)) for name in rows) < 0.014
