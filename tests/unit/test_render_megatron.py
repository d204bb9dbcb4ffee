"""Megatron's command line: each flag with its values on a line, or a refusal."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from tests.golden.cases import rendered

LLAMA = ["recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "data.tokenizer=/tok"]
DATA = "data.path=/data/web_text"


def flags(*words: str, **changes: Any) -> dict[str, list[str]]:
    lines = rendered(*LLAMA, *words, **changes)["megatron_args.txt"].splitlines()
    split = [shlex.split(line) for line in lines]
    assert len({line[0] for line in split}) == len(split)
    return {line[0]: line[1:] for line in split}


def test_layout_batch_and_model() -> None:
    made = flags(DATA)
    expected = {
        "--tensor-model-parallel-size": ["8"], "--pipeline-model-parallel-size": ["4"], "--sequence-parallel": [],
        "--use-distributed-optimizer": [], "--micro-batch-size": ["1"], "--num-layers": ["80"],
        "--num-query-groups": ["8"], "--padded-vocab-size": ["128256"], "--rotary-base": ["500000"],
        "--disable-bias-linear": [], "--untie-embeddings-and-output-weights": [], "--bf16": [],
        "--attention-dropout": ["0.0"], "--hidden-dropout": ["0.0"], "--distributed-timeout-minutes": ["30"],
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    assert "--fp16" not in made
    assert "--num-virtual-stages-per-pipeline-rank" not in made


def test_uneven_first_and_last_stages() -> None:
    made = flags(DATA, "strategy.llm.layers_per_stage=[19,21,21,19]")
    assert made["--decoder-first-pipeline-num-layers"] == ["19"]
    assert made["--decoder-last-pipeline-num-layers"] == ["19"]


def test_interleaved_stages() -> None:
    made = flags(DATA, "strategy.llm.vpp=2", "training.schedule=interleaved")
    assert made["--num-virtual-stages-per-pipeline-rank"] == ["2"]


def test_without_sequence_parallelism_or_overlap_the_flags_are_absent() -> None:
    made = flags(DATA, "training.sequence_parallel=false", "training.overlap_comm=false")
    assert not {"--sequence-parallel", "--overlap-grad-reduce", "--overlap-param-gather"} & made.keys()


def test_a_blend_of_data_and_a_path_with_a_space() -> None:
    made = flags("data.path=0.3 /data/a 0.7 '/data/my books'")
    assert made["--data-path"] == ["0.3", "/data/a", "0.7", "/data/my books"]
    with pytest.raises(ConfigError, match=r"data\.path.*Close the quotes"):
        flags("data.path='/data/a")


def test_without_data_the_scripts_stop_with_the_key_to_set() -> None:
    files = rendered(*LLAMA)
    for name in ("launch.sh", "job.sbatch", "rank.sh"):
        assert "fail 'data.path is empty" in files[name]
    assert "--data-path" not in files["megatron_args.txt"]


def test_random_tokens_on_request() -> None:
    files = rendered("recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "engine.extra.mock-data=true")
    made = files["megatron_args.txt"].splitlines()
    assert {"--mock-data", "--tokenizer-type NullTokenizer", "--vocab-size 128255"} <= set(made)
    assert "data.path is empty" not in files["launch.sh"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.seq_len=16384"], "max_positions is 8192"),
        (["model.components.llm.rope_theta=10000.5"], "--rotary-base"),
        (["model.components.llm.mlp_bias=true"], "bias on all linear layers"),
        (["launcher.timeout_minutes=2.5"], "whole minutes"),
        (["training.optimizer.warmup_steps=100000"], "a step after the warm-up"),
        (["data.tokenizer=a\nb"], "one line of text"),
    ],
)
def test_what_megatron_cannot_express_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags(DATA, *words)
    assert message in str(caught.value)


def test_one_connection_before_blackwell_only() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in rendered(*LLAMA, DATA)["env.sh"]
    newer = rendered(*LLAMA, DATA, "cluster.gpu.name=B200")["env.sh"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in newer
