"""Megatron's arguments, read by a parser made from each version's catalogue, and by megatron-core itself.

Cores from 0.17 on have no wheel for every Python that dslaunch runs on: for them the catalogue alone speaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dslaunch.engines.megatron_catalogue import megatron_catalogue, megatron_versions
from dslaunch.planfile import Plan
from dslaunch.render.megatron import megatron_flags
from dslaunch.schema.config import RunConfig
from tests.golden.cases import planned, rendered
from tests.megatron_parser import parsed, parser
from tests.real.parts import need

need("torch", "megatron")

LLAMA = ["recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "data.path=/d/x", "data.tokenizer=/tok"]
OTHER = [
    "recipe=llama3_8b", "cluster=64xH100", "engine=megatron", "data.path=/d/x", "data.tokenizer=/tok",
    "strategy=auto", "training.global_batch=512", "training.micro_batch=1", "strategy.llm.zero=1",
]  # fmt: skip
MIXTRAL = [*OTHER, "model=mixtral_8x7b", "training.seq_len=4096", "strategy.llm.tp=4", "strategy.llm.pp=4"]
QWEN3_MOE = [*OTHER, "model=qwen3_30b_a3b", "training.seq_len=4096", "strategy.llm.tp=2", "strategy.llm.pp=1"]
DEEPSEEK = [
    *OTHER, "cluster=2048xH100", "model=deepseek_v3", "training.seq_len=4096", "strategy.llm.tp=1",
    "strategy.llm.cp=1",
    "training.global_batch=15360", "strategy.llm.pp=16", "strategy.llm.ep=64", "strategy.llm.recompute=full",
    "strategy.llm.layers_per_stage=[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1]",
]  # fmt: skip
GPT3 = [*OTHER, "model=gpt3_175b", "training.seq_len=2048", "strategy.llm.tp=8", "strategy.llm.pp=8"]
MISTRAL = [*OTHER, "model=mistral_7b", "training.seq_len=8192", "strategy.llm.tp=2", "strategy.llm.pp=1"]
CASES = {
    "published": LLAMA,
    "interleaved": [*LLAMA, "strategy.llm.vpp=2", "training.schedule=interleaved"],
    "uneven": [*LLAMA, "strategy.llm.layers_per_stage=[19,21,21,19]"],
    "two_uneven_stages": [*LLAMA, "strategy.llm.pp=2", "strategy.llm.layers_per_stage=[41,39]"],
    "full_recompute": [*LLAMA, "strategy.llm.recompute=full"],
    "fp16": [*LLAMA, "training.precision=fp16"],
    "context_parallel": [*LLAMA, "strategy.llm.tp=4", "strategy.llm.cp=2"],
    "replicated": [*LLAMA, "strategy.llm.zero=0"],
    "mixtral": [*MIXTRAL, "strategy.llm.ep=4"],
    "whole_experts": [*MIXTRAL, "strategy.llm.ep=8", "strategy.llm.etp=1"],
    "halved_experts": [*MIXTRAL, "strategy.llm.ep=2", "strategy.llm.etp=2", "strategy.llm.cp=2"],
    "qwen3_moe": [*QWEN3_MOE, "strategy.llm.ep=8"],
    "deepseek": DEEPSEEK,
    "deepep": [*MIXTRAL, "strategy.llm.ep=4", "strategy.dispatcher=deepep"],
    "gpt3": GPT3,
}
NEWER = {
    "written_out": [*LLAMA, "strategy.llm.layers_per_stage=[19,20,22,19]"],
    "written_out_interleaved": [
        *LLAMA, "strategy.llm.vpp=2", "training.schedule=interleaved",
        "strategy.llm.layers_per_stage=[18,20,22,20]",
    ],
    "window": MISTRAL,
}  # fmt: skip
"""What 0.12 (and, for the window, 0.14) has no flag for."""
FIELDS = {
    "published": {"num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 28672},
    "mixtral": {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336},
    "whole_experts": {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 4},
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"},
    "qwen3_moe": {"qk_layernorm": True, "expert_model_parallel_size": 8, "num_moe_experts": 128},
    "deepseek": {
        "q_lora_rank": 1536, "v_head_dim": 128, "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_group_topk": 4, "moe_router_dtype": "fp32",
    },
    "gpt3": {"gated_linear_unit": False, "add_bias_linear": True, "normalization": "LayerNorm"},
}


def flags(words: list[str], version: str = "0.16.0") -> dict[str, Any]:
    text = rendered(*words, f"engine.version={version}")["megatron_args.txt"]
    return parsed(text, megatron_catalogue(version))


@cache
def planned_once(name: str) -> tuple[Plan, RunConfig]:
    plan, _, config = planned(*CASES[name])
    return plan, config


def judged(cases: dict[str, list[str]], version: str, path: str = "") -> dict[str, dict[str, Any]]:
    """Case -> what megatron-core made of it: the installed one, or the one in the folder `path`."""
    jobs = []
    for name, words in cases.items():
        component = planned(*words)[0].components["llm"]
        job = {"dp": component.dp, "vpp": component.vpp, "fields": list(FIELDS.get(name, ()))}
        jobs.append({"flags": flags(words, version), **job})
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.rendered_megatron"],
        input=json.dumps(jobs), capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def require_as_planned(cases: dict[str, list[str]], results: dict[str, dict[str, Any]]) -> None:
    """Stages of as many layers, on the same ranks, as the plan has them."""
    for name, words in cases.items():
        plan, _, _ = planned(*words)
        component, found = plan.components["llm"], results[name]
        assert "error" not in found, (name, found)
        assert found["layers"] == [stage.layers for stage in component.stages], name
        assert found["stages"] == [list(stage.ranks) for stage in component.stages], name
        assert found["tp"] == list(range(component.tp)), name
        assert found["expert_groups"] == plan.world_size // component.ep, name
        assert found["experts"] == [component.expert_tp * n for n in range(component.ep)], name
        assert found["config"] == FIELDS.get(name, {}), name


@pytest.mark.parametrize("version", megatron_versions())
def test_every_version_takes_the_flags_and_their_values(version: str) -> None:
    for name in CASES:
        plan, config = planned_once(name)
        made = megatron_flags(replace(plan, engine=replace(plan.engine, version=version)), config)
        text = "\n".join(" ".join((flag, *values)) for flag, values in made.items())
        read = parsed(text, megatron_catalogue(version))
        assert read["--num-layers"] == config.model.components["llm"].layers, name  # type: ignore[union-attr]


def test_the_installed_core_cuts_model_and_ranks_as_planned() -> None:
    cases = CASES | NEWER
    require_as_planned(cases, judged(cases, "0.16.0"))


@pytest.mark.slow
@pytest.mark.parametrize(("series", "version"), [("0.12.3", "0.12.0"), ("0.14.0", "0.14.0")])
def test_older_cores_cut_model_and_ranks_as_planned(series: str, version: str, tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*wheel, f"megatron-core=={series}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"megatron-core {series} cannot be installed: {done.stderr[-300:]}")
    require_as_planned(CASES, judged(CASES, version, str(tmp_path)))


def test_the_core_refuses_what_is_wrong() -> None:
    wrong = {**flags(LLAMA), "--num-query-groups": 7}
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.rendered_megatron"],
        input=json.dumps([{"flags": wrong, "dp": 2, "vpp": 1, "fields": []}]),
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "num_query_groups" in json.loads(done.stdout)[0]["error"]


def test_the_parser_of_this_test_can_refuse() -> None:
    for words in (["--num-layers", "many"], ["--lr-decay-style", "cosin"], ["--bf16", "1"], ["--no-such-flag"]):
        with pytest.raises((argparse.ArgumentError, SystemExit)):
            parser(megatron_catalogue("0.16.0")).parse_args(words)
