"""Megatron-DeepSpeed's command line and the DeepSpeed configuration beside it, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.engines.megatron_catalogue import megatron_deepspeed_catalogue
from dslaunch.errors import ConfigError, PlanError
from tests.golden.cases import rendered
from tests.megatron_parser import parsed

LLAMA = [
    "recipe=llama3_70b", "cluster=64xA100", "engine=megatron_deepspeed", "data.path=/d/x", "data.tokenizer=/t",
]  # fmt: skip
NO_STAGES = ["strategy.llm.pp=1"]


def flags(*words: str) -> dict[str, Any]:
    """Read by the script's own parser, as far as its catalogue tells."""
    return parsed(rendered(*LLAMA, *words)["megatron_args.txt"], megatron_deepspeed_catalogue())


def ds_config(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rendered(*LLAMA, *words)["ds_config.json"])
    return found


def test_model_layout_and_zero_in_the_scripts_own_flags() -> None:
    made = flags()
    expected = {
        "--num-key-value-heads": 8, "--normalization": "rmsnorm", "--rotary-position-embeddings-theta": 500000,
        "--tensor-model-parallel-size": 8, "--pipeline-model-parallel-size": 4, "--zero-stage": 1,
        "--global-batch-size": 512, "--micro-batch-size": 1, "--tokenizer-type": "HFTokenizer",
        "--make-vocab-size-divisible-by": 128256 // 8, "--disable-bias-linear": True, "--bf16": True,
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    assert made["--deepspeed_config"].endswith("/ds_config.json")
    assert "--no-pipeline-parallel" not in made


def test_the_batch_of_the_command_line_is_deepspeeds() -> None:
    config = ds_config()
    triple = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[key] for key in triple] == [512, 1, 256]
    assert config["train_batch_size"] == 1 * 256 * (64 // (8 * 4))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_without_pipeline_stages(stage: int) -> None:
    words = [*NO_STAGES, f"strategy.llm.zero={stage}", "training.grad_accum_dtype=bf16"]
    made, config = flags(*words), ds_config(*words)
    assert made["--no-pipeline-parallel"] is True
    assert made["--zero-stage"] == config["zero_optimization"]["stage"] == stage


def test_no_optimizer_of_its_own_and_no_overlap_under_a_pipeline() -> None:
    piped, plain = ds_config(), ds_config(*NO_STAGES)
    assert not {"optimizer", "scheduler"} & (piped.keys() | plain.keys())
    assert "overlap_comm" not in piped["zero_optimization"]
    assert plain["zero_optimization"]["overlap_comm"] is True


def test_optimizer_states_on_the_cpu_take_the_cpus_optimizer() -> None:
    made = flags(*NO_STAGES, "strategy.llm.offload=cpu")
    assert made["--cpu-optimizer"] is True
    assert "--ds_fused_adam" not in made


def test_recompute() -> None:
    full = flags("strategy.llm.recompute=full")
    assert full["--recompute-granularity"] == "full"
    assert full["--deepspeed-activation-checkpointing"] is True
    assert flags()["--recompute-activations"] is True


def test_extra_goes_to_the_script_or_to_deepspeed() -> None:
    words = ["engine.extra.log-params-norm=true", "engine.extra.comms_logger.enabled=true"]
    assert flags(*words)["--log-params-norm"] is True
    assert ds_config(*words)["comms_logger"] == {"enabled": True}
    assert "--comms_logger" not in flags(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.llm.zero=2"], "strategy.llm.zero is 2"),
        (["strategy.llm.layers_per_stage=[19,21,21,19]"], "cuts the layers evenly"),
        (["strategy.llm.cp=2", "strategy.llm.tp=4"], "takes cp 1"),
        (["strategy.llm.tp=16", "cluster.node.nvlink_domain=16", "strategy.llm.pp=1"], "kv_heads 8 / tp 16"),
        (["model.components.llm.qk_norm=true"], "model.components.llm.qk_norm"),
        (["model.components.llm.qkv_bias=true"], "qkv_bias True"),
        (["engine.extra.zero-stage=1"], "strategy.COMPONENT.zero"),
        (["engine.extra.no-such-flag=1"], "no-such-flag"),
    ],
)
def test_what_it_cannot_express_is_refused(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        rendered(*LLAMA, *words)
    assert message in str(caught.value)


def test_without_data_the_scripts_stop_with_the_key_to_set() -> None:
    launch = rendered(*LLAMA, "data.path=")["launch.sh"]
    assert "fail 'data.path is empty" in launch
    assert "mock-data" not in launch


def test_the_schedule_that_splits_the_backward_pass_is_a_flag() -> None:
    words = ("training.schedule=zb-h1", "engine.version=0.17.4")
    assert flags(*words).get("--enable-zbh1-pipeline") is True
    assert "--enable-zbh1-pipeline" not in flags() | flags(*NO_STAGES, *words)
