"""Layers at both ends that stay in bf16 beside those in fp8, and what predicts further tokens under fp8."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.records import Record
from benchmarks.settings import setting
from dslaunch.hardware.efficiency import SHIPPED
from dslaunch.hardware.software import flagged
from dslaunch.plan.case import Case
from dslaunch.plan.compute import layers_spent, speeds
from dslaunch.plan.memory import stage_memory
from dslaunch.plan.time import step_time
from dslaunch.plan.wide import spans


def case_of(pp: int = 2, mtp: int = 0, gpu: str = "H100-80GB", **flags: Any) -> Case:
    record = Record.model_validate({
        "id": "one", "framework": "Megatron-LM", "seq_len": 2048,
        "n_gpus": 8, "tp": 1, "pp": pp, "dp": 8 // pp,
        "micro_batch": 1, "global_batch": 32, "precision": "bf16", "distributed_optimizer": True,
        "gpu": {"type": gpu}, "source": {"title": "a test"},
        "model": {
            "name": "GPT", "layers": 8, "hidden": 4096, "ffn_hidden": 14336, "heads": 32, "kv_heads": 8,
            "vocab": 32000, "gated_mlp": True, "mtp_layers": mtp, "untied_embeddings": True,
        },
        "flags": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "swiglu": True} | flags,
    })  # fmt: skip
    return setting(record).cases["llm"]


def test_the_flag_means_one_layer_at_each_end_unless_numbers_are_given() -> None:
    assert flagged("megatron", {}).wide_layers == (0, 0)
    assert flagged("megatron", {"num-layers-at-start-in-bf16": 3}).wide_layers == (0, 0)
    assert flagged("megatron", {"first-last-layers-bf16": True}).wide_layers == (1, 1)
    more = {"first-last-layers-bf16": True, "num-layers-at-start-in-bf16": 2, "num-layers-at-end-in-bf16": 0}
    assert flagged("megatron", more).wide_layers == (2, 0)


@pytest.mark.parametrize(
    ("start", "end", "first", "number", "expected"),
    [
        (1, 1, 0, 8, [(True, 0, 1), (False, 1, 6), (True, 7, 1)]),
        (1, 1, 0, 4, [(True, 0, 1), (False, 1, 3)]),
        (1, 1, 4, 4, [(False, 4, 3), (True, 7, 1)]),
        (5, 4, 0, 8, [(True, 0, 5), (True, 5, 3)]),
        (6, 0, 4, 4, [(True, 4, 2), (False, 6, 2)]),
        (0, 0, 4, 4, [(False, 4, 4)]),
    ],
)
def test_spans(start: int, end: int, first: int, number: int, expected: list[tuple[bool, int, int]]) -> None:
    flags = {"num-layers-at-start-in-bf16": start, "num-layers-at-end-in-bf16": end}
    case = case_of(**{"first-last-layers-bf16": True}, **flags)
    assert list(spans(case, first, number)) == expected


def test_without_fp8_there_is_nothing_to_keep_apart() -> None:
    plain = case_of(**{"first-last-layers-bf16": True, "fp8-format": None})
    assert list(spans(plain, 0, 8)) == [(False, 0, 8)]


def test_layers_in_bf16_take_their_time_and_have_no_copies_in_fp8() -> None:
    """One layer of four on the first stage: products are those of bf16, weights have no 8-bit copy."""
    narrow, ends = case_of(), case_of(**{"first-last-layers-bf16": True})
    every = case_of(**{"first-last-layers-bf16": True, "num-layers-at-start-in-bf16": 4})
    spent = [layers_spent(case, 0, speeds(case, SHIPPED)).products for case in (narrow, ends, every)]
    assert spent[1] == pytest.approx(0.75 * spent[0] + 0.25 * spent[2])
    assert spent[2] > 1.5 * spent[0]
    weights = [stage_memory(case, 0).weights for case in (narrow, ends, every)]
    assert weights[1] == pytest.approx(0.75 * weights[0] + 0.25 * weights[2])
    assert weights[0] > weights[2]
    assert stage_memory(ends, 0).activations > stage_memory(narrow, 0).activations
    times = [step_time({"llm": case}, SHIPPED).step_s for case in (narrow, ends, every)]
    assert times[0] < times[1] < times[2]


def test_under_fp8_params_layers_in_bf16_keep_whole_weights() -> None:
    """Blackwell's products take a matrix as it lies: one byte a parameter, where bf16 has two."""
    both = {"gpu": "B200", "fp8-param-gather": True}
    narrow, ends = case_of(**both), case_of(**both, **{"first-last-layers-bf16": True})
    assert stage_memory(ends, 0).weights > stage_memory(narrow, 0).weights


def test_what_predicts_further_tokens_has_copies_in_fp8_too() -> None:
    """Hopper has each matrix a second time, in one byte and its transpose in another."""
    plain, wide = case_of(pp=1, mtp=1), case_of(pp=1, mtp=1, **{"fp8-format": None})
    of_layers, no_mtp = case_of(pp=1, mtp=0), case_of(pp=1, mtp=0, **{"fp8-format": None})
    copies = stage_memory(plain, 0).weights - stage_memory(wide, 0).weights
    without = stage_memory(of_layers, 0).weights - stage_memory(no_mtp, 0).weights
    layer = without / 8
    joined = layer * (2 * 4096 * 4096) / (4096 * 4096 * 2.5 + 3 * 4096 * 14336)
    assert copies - without == pytest.approx(layer + joined, rel=0.01)
