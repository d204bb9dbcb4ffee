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


def test_simumax_rows_within_its_own_error() -> None:
    """TP, PP, CP, EP of Llama 70B and 405B and of DeepSeek V2 and V3: SimuMax itself is within 1.4 %."""
    rows = [name for name in records() if name.startswith("simumax-")]
    assert len(rows) == 43
    assert max(abs(error(name)) for name in rows) < 0.014
