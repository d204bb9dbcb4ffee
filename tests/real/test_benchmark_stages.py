"""Layers of each pipeline stage by Megatron's flags."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.records import Record
from benchmarks.settings import setting
from benchmarks.stages import by_flags, written_out
from tests.real.parts import need

LAYOUTS = ["Et*3|(tt|)*29m|L", "Ettt|(tt|)*2,m|L", "E|(t|)*4L"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_megatron_reads_it(layout: str) -> None:
    need("megatron")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert written_out(layout) == ["".join(letters[layer.name] for layer in part) for part in theirs]


@pytest.mark.parametrize(
    ("flags", "layers", "pp", "found"),
    [
        ({"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}, 126, 16,
         ((7, *[8] * 14, 7), None)),
        ({"account-for-embedding-in-pipeline-split": True}, 31, 4, ((7, 8, 8, 8), None)),
        ({"decoder-first-pipeline-num-layers": 3}, 15, 4, ((3, 4, 4, 4), None)),
        ({"decoder-first-pipeline-num-layers": 3, "decoder-last-pipeline-num-layers": 4}, 61, 8,
         ((3, *[9] * 6, 4), None)),
        ({"decoder-last-pipeline-num-layers": 5}, 14, 4, ((3, 3, 3, 5), None)),
        ({"pipeline-model-parallel-layout": "Et|(tt|)*6mL"}, 13, 2, ((7, 6), 4)),
        ({"pipeline-model-parallel-layout": "Et*3|(tt|)*29m|L"}, 61, 16, ((5, *[4] * 13, 2, 2), 2)),
        ({"pipeline-model-parallel-layout": "E|tt|tt|L"}, 4, 4, ((), None)),
        ({}, 16, 4, ((), None)),
    ],
)  # fmt: skip
def test_stages_by_flags(
    flags: dict[str, Any], layers: int, pp: int, found: tuple[tuple[int, ...], int | None]
) -> None:
    assert by_flags(flags, layers, pp) == found


def test_a_record_has_the_stages_that_its_flags_name() -> None:
    shape = {"layers": 30, "hidden": 1024, "heads": 8, "ffn_hidden": 4096, "vocab": 51200}
    run = {
        "id": "run", "model": shape, "framework": "Megatron-LM", "gpu": {"type": "H100-80GB"}, "n_gpus": 8,
        "pp": 4, "seq_len": 1024, "micro_batch": 1, "global_batch": 64,
    }  # fmt: skip
    counted = {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}
    made = setting(Record.model_validate({**run, "flags": counted}))
    assert made.cases["llm"].layout.layers_per_stage == (7, 8, 8, 7)
    layout = {"pipeline-model-parallel-layout": "Et*6|(t*8|)*2t*8L"}
    made = setting(Record.model_validate({**run, "flags": layout}))
    assert made.cases["llm"].layout.layers_per_stage == (6, 8, 8, 8)
