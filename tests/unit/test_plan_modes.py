"""What an engine does beside the layout: in plan.json, on the page of `dslaunch plan`, and read back the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.errors import PlanError
from dslaunch.planfile import plan_from_json
from tests.command import CommandLine
from tests.golden.cases import planned, rendered

LLAMA = ["recipe=llama3_8b", "cluster=64xA100", "script=train.py"]
DEEPSPEED = [*LLAMA, "engine=deepspeed"]
MODES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "none": ([*DEEPSPEED, "strategy=zero3"], {}),
    "zero_plus_plus": (
        [*DEEPSPEED, "strategy=zero3_plus_plus"],
        {"zero_plus_plus": {"hpz": 8, "quantized_weights": True, "quantized_gradients": True}},
    ),
    "nvme": (
        [*DEEPSPEED, "strategy=zero3_nvme_offload", "strategy.nvme={path: /nvme/run, threads: 4}"],
        {
            "nvme": {
                "path": "/nvme/run", "block_size": 1048576, "queue_depth": 8, "threads": 4, "single_submit": False,
                "overlap_events": True,
            }
        },
    ),
    "zenflow": (
        [*DEEPSPEED, "strategy=zenflow", "training.global_batch=64"],
        {
            "zenflow": {
                "topk_ratio": 0.1, "select_interval": 16, "update_interval": 4, "warmup_steps": 0,
                "overlap_step": True,
            }
        },
    ),
    "super_offload": ([*DEEPSPEED, "strategy=super_offload"], {"super_offload": {"cpu_cores": 0.8}}),
    "autotp": ([*DEEPSPEED, "strategy=autotp"], {"autotp": {"size": 8}}),
    "ulysses": ([*DEEPSPEED, "strategy=ulysses"], {"ulysses": {"size": 8}}),
    "files": (
        [*DEEPSPEED, "strategy=zero3", "checkpoint.universal=true", "engine.huggingface=true",
         "engine.activation_checkpointing={enabled: true, cpu: true}",
         "engine.monitor.csv={enabled: true, path: m}"],
        {
            "activation_checkpointing": {
                "partition_activations": False, "cpu": True, "contiguous": False, "synchronize": False,
                "profile": False,
            },
            "universal_checkpoint": {},
            "huggingface": {},
            "csv_monitor": {"path": "m"},
        },
    ),
    "accelerate": ([*LLAMA, "strategy=fsdp2", "engine.accelerate=true"], {"accelerate": {}}),
    "ddp": (
        [*LLAMA, "strategy=ddp", "goal.memory_fraction=1", "strategy.ddp={static_graph: true, comm_hook: bf16}"],
        {
            "ddp": {
                "bucket_cap_mb": 25, "static_graph": True, "find_unused_parameters": False,
                "gradient_as_bucket_view": False, "sync_batchnorm": False, "comm_hook": "bf16",
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_a_mode_stands_in_plan_json_with_its_settings(name: str) -> None:
    words, wanted = MODES[name]
    text = rendered(*words)["plan.json"]
    assert json.loads(text)["engine"]["modes"] == wanted
    assert plan_from_json(text).engine == planned(*words)[0].engine


def test_the_page_names_modes_and_the_frameworks_own_keys(dslaunch: CommandLine) -> None:
    words = MODES["zero_plus_plus"][0]
    shown = dslaunch(
        "plan", *words, "checkpoint.universal=true", "engine.extra.flops_profiler.enabled=true"
    ).out
    assert "\nwith zero_plus_plus: hpz 8, quantized_weights, quantized_gradients\n" in shown
    assert "\nwith universal_checkpoint\n" in shown
    assert '\nwith engine.extra: {"flops_profiler": {"enabled": true}}\n' in shown
    assert "\nwith " not in dslaunch("plan", *MODES["none"][0]).out


def test_the_plan_holds_the_frameworks_own_keys() -> None:
    text = rendered(*MODES["none"][0], "engine.extra.flops_profiler.enabled=true")["plan.json"]
    assert json.loads(text)["engine"]["extra"] == {"flops_profiler": {"enabled": True}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*DEEPSPEED, "strategy=zero3", "engine.accelerate=true"], "engine.accelerate is for engine torch"),
        (["recipe=vla_tiny", "cluster=local", "strategy=ddp", "engine.accelerate=true"], "makes no Accelerator"),
        (
            ["recipe=vla_tiny", "cluster=local", "strategy=fsdp2", "module=", "script=t.py",
             "engine.accelerate=true"],
            "on CPUs accelerate does no fsdp2",
        ),
    ],
)  # fmt: skip
def test_accelerate_is_for_scripts_that_it_shards(words: list[str], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(*words)
    assert message in str(caught.value)


def test_accelerate_has_no_file_where_it_would_leave_the_sharding_out() -> None:
    words = ["recipe=vla_tiny", "cluster=local", "module=", "script=t.py"]
    assert "accelerate.yaml" not in rendered(*words, "strategy=fsdp2")
    assert "accelerate.yaml" in rendered(*words, "strategy=ddp")


ADAPTERS = ["model.components.llm.train=lora", "model.components.llm.lora={rank: 8}"]


def test_native_takes_the_models_that_the_runtime_executes() -> None:
    """A script of the user's may train adapters; dslaunch.runtime has no modules for them."""
    tiny = ["recipe=vla_tiny", "cluster=local", "engine=native"]
    assert planned(*tiny, "module=")[0].program.module == "dslaunch.runtime"
    with pytest.raises(PlanError, match=r"llm.train: found 'lora'; dslaunch.runtime executes all, nothing"):
        planned(*tiny, "module=", *ADAPTERS)
    assert "native" in planned(*tiny, "module=", "script=t.py", *ADAPTERS)[0].engines


@pytest.mark.parametrize(
    ("flags", "products"),
    [
        (["fp8-format=hybrid"], "fp8, tensorwise"),
        (["fp8-format=e4m3", "fp8-recipe=blockwise"], "fp8, blockwise"),
        (["fp8-format=e4m3", "fp8-recipe=mxfp8"], "mxfp8"),
    ],
)
def test_products_in_fp8_keep_less_and_take_less_time(
    dslaunch: CommandLine, flags: list[str], products: str
) -> None:
    words = ["plan", "recipe=llama3_70b", "cluster=64xB200", "--accept", "memory.gpu"]
    narrow = [*words, *(f"engine.extra.{flag}" for flag in flags)]
    assert f"bf16 (products in {products})" in dslaunch(*narrow).out
    before, after = (json.loads(dslaunch(*each, "--json").out) for each in (words, narrow))
    kept_before, kept_after = (_kept(each) for each in (before, after))
    assert kept_after < 0.95 * kept_before
    assert after["step_time_s"] < 0.95 * before["step_time_s"]
    assert after["mfu"] > before["mfu"]


def _kept(plan: dict[str, Any]) -> float:
    """Activations of the fullest stage, in GiB."""
    return max(stage["memory_gib"]["activations"] for stage in plan["components"]["llm"]["stages"])
