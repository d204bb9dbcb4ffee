"""Megatron-DeepSpeed's DeepSpeed configuration, read by DeepSpeed for the plan's data-parallel size."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import planned, rendered
from tests.real.parts import need

need("torch", "deepspeed")

from tests.real.test_rendered_deepspeed import judged  # noqa: E402

LLAMA = ["recipe=llama3_70b", "cluster=64xA100", "engine=megatron_deepspeed"]
CASES = {
    "pipeline": [],
    "pipeline_fp16": ["training.precision=fp16"],
    "zero2": ["strategy.llm.pp=1", "strategy.llm.zero=2"],
    "zero3": ["strategy.llm.pp=1", "strategy.llm.zero=3", "strategy.llm.tp=4"],
    "offload": ["strategy.llm.pp=1", "strategy.llm.offload=cpu"],
}


def test_deepspeed_reads_batch_and_stage() -> None:
    jobs, wanted = [], []
    for words in CASES.values():
        component = planned(*LLAMA, *words)[0].components["llm"]
        config = json.loads(rendered(*LLAMA, *words)["ds_config.json"])
        jobs.append({"config": config, "world": 64, "dp": component.dp, "initialize": 0})
        triple = [512, component.micro_batch, component.num_microbatches]
        wanted.append({"batch": triple, "stage": component.zero})
    assert judged(jobs) == wanted
    assert [row["stage"] for row in wanted] == [1, 1, 2, 3, 1]


@pytest.mark.parametrize("dp", [1, 4])
def test_another_data_parallel_size_is_refused(dp: int) -> None:
    config = json.loads(rendered(*LLAMA)["ds_config.json"])
    (result,) = judged([{"config": config, "world": 64, "dp": dp, "initialize": 0}])
    assert "train_batch_size" in result["error"]
