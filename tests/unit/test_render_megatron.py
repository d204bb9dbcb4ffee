"""Megatron's command line: each flag with its values on a line, or a refusal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.errors import ConfigError, PlanError
from dslaunch.importing.megatron import import_megatron
from tests.golden.cases import planned, rendered

LLAMA = ["recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "data.tokenizer=/tok"]
DATA = "data.path=/data/web_text"
INTERLEAVED = "training.schedule=interleaved"


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
    made = flags(DATA, "strategy.llm.vpp=2", INTERLEAVED)
    assert made["--num-virtual-stages-per-pipeline-rank"] == ["2"]


def test_the_embedding_and_the_loss_may_take_a_layers_place() -> None:
    lines = rendered("recipe=llama3_405b")["megatron_args.txt"].splitlines()
    assert {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"} <= set(lines)
    assert "--num-virtual-stages-per-pipeline-rank 8" in lines
    assert not [line for line in lines if line.startswith("--decoder-")]
    one = flags(DATA, "strategy.llm.layers_per_stage=[20,20,20,20]", "strategy.llm.vpp=2", INTERLEAVED)
    assert not [flag for flag in one if flag.startswith("--account-")]
    end = flags(
        DATA, "model.components.llm.layers=79", "strategy.llm.layers_per_stage=[20,20,20,19]",
        "strategy.llm.vpp=2", INTERLEAVED,
    )  # fmt: skip
    assert [flag for flag in end if flag.startswith("--account-")] == ["--account-for-loss-in-pipeline-split"]


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
        (["training.optimizer.warmup_steps=1200000"], "a step after the warm-up"),
        (["data.tokenizer=a\nb"], "one line of text"),
    ],
)
def test_what_megatron_cannot_express_is_refused(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        flags(DATA, *words)
    assert message in str(caught.value)


@pytest.mark.parametrize("word", ["post_norms=true", "sinks=true", "mlp_bias=true"])
def test_a_search_passes_over_megatron_where_it_has_no_flags(word: str) -> None:
    words = ["recipe=llama3_8b", "cluster=16xH100", "strategy=auto", "engine.path=/o", "script=train.py"]
    plan, _, _ = planned(*words, f"model.components.llm.{word}")
    assert not plan.engine.name.startswith("megatron")


MIXTRAL = [
    "recipe=llama3_8b", "cluster=64xH100", "engine=megatron", "data.tokenizer=/tok", DATA, "strategy=auto",
    "strategy.llm.zero=1", "model=mixtral_8x7b", "training.global_batch=512", "training.micro_batch=1",
    "strategy.llm.tp=4", "strategy.llm.pp=4", "strategy.llm.ep=4",
]  # fmt: skip


def moe_flags(*words: str) -> dict[str, list[str]]:
    lines = rendered(*MIXTRAL, *words)["megatron_args.txt"].splitlines()
    return {line[0]: line[1:] for line in map(shlex.split, lines)}


def test_a_mixture_of_experts() -> None:
    made = moe_flags("strategy.llm.etp=4")
    expected = {
        "--num-experts": ["8"], "--moe-router-topk": ["2"], "--moe-ffn-hidden-size": ["14336"],
        "--expert-model-parallel-size": ["4"], "--expert-tensor-parallel-size": ["4"], "--moe-grouped-gemm": [],
        "--moe-router-load-balancing-type": ["aux_loss"], "--moe-aux-loss-coeff": ["0.01"],
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    lacking = {"--moe-layer-freq", "--moe-shared-expert-intermediate-size", "--moe-router-num-groups"}
    assert not {*lacking, "--moe-router-topk-scaling-factor", "--no-rope-fusion"} & made.keys()
    assert made["--attention-backend"] == ["flash"]
    assert moe_flags("engine.extra.moe-aux-loss-coeff=0.02")["--moe-aux-loss-coeff"] == ["0.02"]


def test_experts_that_are_cut_otherwise_than_the_rest(tmp_path: Path) -> None:
    whole = moe_flags("strategy.llm.ep=8", "strategy.llm.etp=1")
    sizes = {"tensor-model": "4", "expert-model": "8", "expert-tensor": "1"}
    assert {name: whole[f"--{name}-parallel-size"] for name in sizes} == {n: [v] for n, v in sizes.items()}
    file = tmp_path / "megatron_args.txt"
    file.write_text(rendered(*MIXTRAL, "strategy.llm.ep=8", "strategy.llm.etp=1")["megatron_args.txt"])
    recipe = yaml.safe_load(import_megatron(str(file), ["cluster=64xH100"]).files["recipes/megatron_args.yaml"])
    assert recipe["layouts"][64]["llm"]["etp"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.llm.etp=3"], "experts.ffn 14336 / etp 3 = 4779 is not whole; etp can be 1, 2, 4, 7, 8"),
        (["strategy.llm.etp=16"], "groups of 16 do not fill the 8 GPUs"),
        (["strategy.llm.ep=8", "strategy.llm.etp=8"], "among tp 4 x dp 4 x cp 1 = 16 ranks, and 16 / 64 = 0.25"),
        (["model=llama3_8b", "strategy.llm.ep=1", "strategy.llm.etp=2"], "there are no experts to cut"),
        (
            ["model.components.llm.mlp_bias=true", "model.components.llm.out_bias=true",
             "model.components.llm.qkv_bias=true"],
            "Set strategy.llm.etp=1",
        ),
        (
            ["engine=deepspeed", "script=t.py", "strategy.llm.pp=1", "strategy.llm.ep=1", "strategy.llm.etp=2"],
            "deepspeed cuts experts as the rest of the layer, by tp 4",
        ),
    ],
)  # fmt: skip
def test_experts_cut_as_nobody_can(words: list[str], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        moe_flags("strategy=zero1", *words)
    assert message in str(caught.value)


def test_tokens_that_travel_by_deepep() -> None:
    word = "strategy.dispatcher=deepep"
    made = moe_flags(word)
    assert (made["--moe-token-dispatcher-type"], made["--moe-router-dtype"]) == (["flex"], ["fp32"])
    assert made["--moe-flex-dispatcher-backend"] == ["deepep"]
    old = moe_flags(word, "engine.version=0.14.0")
    assert "--moe-flex-dispatcher-backend" not in old
    assert old["--moe-enable-deepep"] == []
    plan, prediction, _ = planned(*MIXTRAL, word)
    assert plan.engine.modes == {"deepep": {}}
    assert prediction.step_time_s < planned(*MIXTRAL)[1].step_time_s


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=llama3_8b", "strategy.llm.ep=1"], "nothing travels"),
        (["cluster=64xV100"], "GPUs of NVIDIA from Ampere on"),
        (
            ["engine=deepspeed", "script=train.py", "strategy.llm.pp=1", "strategy.llm.ep=1"],
            "which is Megatron's; deepspeed does not have it",
        ),
    ],
)
def test_deepep_where_it_is_not(words: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(*MIXTRAL, "strategy=zero1", "strategy.dispatcher=deepep", *words)


def test_deepseeks_router_and_latent_attention() -> None:
    words = [
        "model=deepseek_v3", "cluster=2048xH100", "training.global_batch=15360", "strategy.llm.tp=1",
        "strategy.llm.cp=1",
        "strategy.llm.pp=16", "strategy.llm.ep=64", "strategy.llm.recompute=full",
        "strategy.llm.layers_per_stage=[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1]",
    ]  # fmt: skip
    made = moe_flags(*words)
    expected = {
        "--moe-layer-freq": ["([0]*3+[1]*58)"], "--moe-shared-expert-intermediate-size": ["2048"],
        "--moe-router-enable-expert-bias": [], "--moe-router-score-function": ["sigmoid"],
        "--multi-latent-attention": [], "--q-lora-rank": ["1536"], "--qk-head-dim": ["128"], "--qk-layernorm": [],
        "--rope-type": ["rope"], "--mtp-num-layers": ["1"], "--moe-router-num-groups": ["8"],
        "--moe-router-group-topk": ["4"], "--moe-router-topk-scaling-factor": ["2.5"],
        "--moe-router-dtype": ["fp32"], "--no-rope-fusion": [], "--attention-backend": ["auto"],
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    assert not {"--num-query-groups", "--kv-channels"} & made.keys()
    assert "--rope-type" not in moe_flags(*words, "engine.version=0.12.0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.precision=fp16"], "ep is 4, training.precision fp16"),
        (["model.components.llm.sinks=true"], "gpt-oss, whose activation is none that dslaunch describes"),
        (["model.components.llm.mtp_layers=1", "model.components.llm.position=learned"], "rotary positions only"),
        (
            [
                "model.components.llm.mtp_layers=1", "engine.version=0.12.0", "strategy.llm.cp=2",
                "strategy.llm.ep=2",
            ],
            "core 0.14.0 and newer do",
        ),
        (["training.sequence_parallel=false"], "only beside sequence parallelism"),
        (["strategy.llm.ep=8"], "dp 4 x cp 1 = 4 ranks, and 4 / 8 = 0.5"),
    ],
)  # fmt: skip
def test_what_megatrons_own_validation_would_stop_at(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        moe_flags("strategy=zero1", *words)
    assert message in str(caught.value)


def test_grouped_products_of_experts_are_for_bf16() -> None:
    assert "--moe-grouped-gemm" not in moe_flags("training.precision=fp16", "strategy.llm.ep=1")


def test_middle_stages_that_differ_are_written_out() -> None:
    made = flags(DATA, "strategy.llm.layers_per_stage=[19,20,22,19]")
    layout = made["--pipeline-model-parallel-layout"][0]
    assert [part.count("t") for part in layout.split("|")] == [19, 20, 22, 19]
    assert layout.startswith("Et")
    assert layout.endswith("tL")
    assert not {"--decoder-first-pipeline-num-layers", "--num-virtual-stages-per-pipeline-rank"} & made.keys()


def test_a_table_that_tp_does_not_divide_is_filled_up() -> None:
    words = ["model.components.llm.vocab=128257"]
    assert flags(DATA, *words)["--padded-vocab-size"] == ["128264"]
    old = flags(DATA, *words, "engine.version=0.12.0")
    assert "--padded-vocab-size" not in old
    assert old["--make-vocab-size-divisible-by"] == [str(128264 // 8)]


def test_fp8_where_the_gpu_has_it() -> None:
    fp8 = "engine.extra.fp8-format=hybrid"
    with pytest.raises(ConfigError, match=r"fp8-format: A100-SXM4-80GB computes in .*, not in fp8"):
        flags(DATA, fp8)
    assert moe_flags(fp8)["--fp8-format"] == ["hybrid"]


@pytest.mark.parametrize(
    ("version", "words", "message"),
    [
        ("0.12.0", ["strategy.llm.layers_per_stage=[19,20,22,19]"], "layers_per_stage: Megatron-LM core 0.12.0"),
        ("0.12.0", ["strategy.llm.layers_per_stage=[19,20,22,19]"], "have it: 0.13.0 to 0.19.0"),
        ("0.14.0", ["model.components.llm.window.tokens=4096"], "have it: 0.15.0 to 0.19.0"),
        ("0.14.0", ["model.components.llm.kv_heads=4"], "core 0.16.0 and newer can"),
        ("0.16.0", ["engine.extra.moe-paged-stash=true"], "have it: 0.18.0 to 0.19.0"),
        ("0.16.0", ["model.components.llm.post_norms=true"], "post_norms"),
    ],
)
def test_what_a_version_lacks_is_refused_and_others_are_named(
    version: str, words: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        flags(DATA, *words, f"engine.version={version}")
    assert message in str(caught.value)


@pytest.mark.parametrize(("typed", "rendered_for"), [("0.16", "0.16.1"), ("0.15", "0.15.3"), ("0.17.0", "0.17.0")])
def test_a_series_is_its_newest_release(typed: str, rendered_for: str) -> None:
    plan, _, _ = planned(*LLAMA, DATA, f"engine.version={typed}")
    assert plan.engine.version == rendered_for


def test_a_release_has_what_its_own_parser_has() -> None:
    """Arguments that came with a patch release, and a signal, which the parser takes by name."""
    later = "engine.extra.verify-integrity=true"
    assert flags(DATA, later, "engine.version=0.17.1")["--verify-integrity"] == []
    with pytest.raises(ConfigError, match=r"have it: 0\.17\.1 to"):
        flags(DATA, later, "engine.version=0.17.0")
    assert flags(DATA, "engine.extra.exit-signal=SIGUSR1")["--exit-signal"] == ["SIGUSR1"]
    with pytest.raises(ConfigError, match="exit-signal"):
        flags(DATA, "engine.extra.exit-signal=10")


def test_the_loader_makes_no_mask_that_kernels_do_not_read() -> None:
    assert flags(DATA)["--no-create-attention-mask-in-dataloader"] == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("rotary-base=10000", "rope_theta"), ("kv-channels=64", "head_dim"), ("swiglu=true", "gated_mlp"),
        ("adam-beta2=0.9", "betas"), ("expert-tensor-parallel-size=1", "strategy.COMPONENT."),
    ],
)  # fmt: skip
def test_extra_flags_do_not_make_another_model_than_the_plans(word: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        flags(DATA, f"engine.extra.{word}")


def test_an_unknown_version_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"version is 0\.3\.0; megatron is rendered for 0\.16\.0, 0\.19\.0"):
        flags(DATA, "engine.version=0.3.0")


def test_one_connection_before_blackwell_only() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in rendered(*LLAMA, DATA)["env.sh"]
    newer = rendered(*LLAMA, DATA, "cluster.gpu.name=B200")["env.sh"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in newer
