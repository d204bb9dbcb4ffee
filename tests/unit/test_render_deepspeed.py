"""The DeepSpeed configuration: what stands in it, and what is refused instead."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from tests.golden.cases import rendered

LLAMA = ["recipe=llama3_8b", "cluster=8xA100", "engine=deepspeed", "script=train.py"]


def config(*words: str, name: str = "ds_config.json", **changes: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(rendered(*words, **changes)[name])
    return loaded


def test_each_component_has_the_batch_of_its_own_dp() -> None:
    files = rendered("recipe=vla70b", "cluster=64xA100")
    triples = {}
    for name in ("vision_encoder", "projector", "llm"):
        made = json.loads(files[f"ds_config.{name}.json"])
        triples[name] = tuple(
            made[key]
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
    assert triples == {"vision_encoder": (512, 1, 16), "projector": (512, 1, 8), "llm": (512, 1, 256)}
    assert "ds_config.json" not in files


def test_overlap_comm_stands_only_where_deepspeed_reads_it() -> None:
    files = rendered("recipe=vla70b", "cluster=64xA100")
    zero = {n: json.loads(files[f"ds_config.{n}.json"])["zero_optimization"] for n in ("vision_encoder", "llm")}
    assert zero["vision_encoder"]["overlap_comm"] is True
    assert "overlap_comm" not in zero["llm"]
    off = config(*LLAMA, "strategy=zero3", "training.overlap_comm=false")["zero_optimization"]
    assert off["overlap_comm"] is False


def test_offload_pins_memory_on_gpu_hosts_only() -> None:
    gpu = config(*LLAMA, "strategy=zero3_cpu_offload")["zero_optimization"]
    cpu = config("recipe=vla_tiny", "cluster=local", "strategy=zero3_cpu_offload")["zero_optimization"]
    assert gpu["offload_optimizer"] == gpu["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert cpu["offload_optimizer"] == cpu["offload_param"] == {"device": "cpu", "pin_memory": False}


def test_torchs_adam_is_taken_on_cpu_ranks_alone() -> None:
    assert config("recipe=vla_tiny", "cluster=local")["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in config(*LLAMA, "strategy=zero2")["optimizer"]["params"]


def test_the_runtime_brings_its_own_schedule_and_a_script_gets_one() -> None:
    assert "scheduler" not in config("recipe=vla_tiny", "cluster=local")
    assert config(*LLAMA, "strategy=zero2")["scheduler"]["type"] == "WarmupCosineLR"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["schedule=constant", "warmup_steps=0"], None),
        (["schedule=constant", "warmup_steps=10"], "WarmupLR"),
        (["schedule=linear", "warmup_steps=10", "min_lr=0"], "WarmupDecayLR"),
        (["schedule=cosine", "warmup_steps=0"], "WarmupCosineLR"),
        (["schedule=linear", "warmup_steps=0"], "OneCycle"),
    ],
)
def test_schedule(words: list[str], expected: str | None) -> None:
    made = config(*LLAMA, "strategy=zero2", *[f"training.optimizer.{word}" for word in words])
    assert made.get("scheduler", {}).get("type") == expected


def test_a_run_of_one_step_has_no_warm_up_that_is_longer() -> None:
    words = ["strategy=zero2", "training.steps=1", "training.optimizer.warmup_steps=0"]
    params = config(*LLAMA, *words)["scheduler"]["params"]
    assert (params["total_num_steps"], params["warmup_num_steps"], params["warmup_min_ratio"]) == (2, 2, 1.0)
    with_two = config(*LLAMA, *words[:1], "training.steps=2", words[2])["scheduler"]["params"]
    assert with_two == params


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule=cosine", "warmup_steps=1"], "last 2 steps at least"),
        (["schedule=constant", "warmup_steps=1"], "last 2 steps at least"),
        (["schedule=linear", "warmup_steps=1", "min_lr=0"], "last 2 steps at least"),
        (["schedule=wsd", "decay_steps=10"], "falls at the end. Take engine.huggingface=true"),
        (["schedule=linear", "warmup_steps=10", "min_lr=1e-6"], "ends at 0"),
    ],
)
def test_a_schedule_that_deepspeed_cannot_follow_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*LLAMA, "strategy=zero2", *[f"training.optimizer.{word}" for word in words])


SHARES = [("8e-5", "8e-7"), ("3e-4", "3e-5"), ("0.7", "0.007"), ("3e-5", "1e-5")]


@pytest.mark.parametrize(("lr", "min_lr"), SHARES)
def test_a_share_of_the_peak_is_written_as_a_reader_would(lr: str, min_lr: str) -> None:
    made = config(*LLAMA, "strategy=zero2", f"training.optimizer={{lr: {lr}, min_lr: {min_lr}}}")
    ratio = made["scheduler"]["params"]["cos_min_ratio"]
    assert ratio == float(Fraction(min_lr) / Fraction(lr))


OWN_RATE = ["strategy=zero2", "training.optimizer={lr: 3e-5, min_lr: 0, schedule: constant}"]
OWN_RATE.append("model.components.llm.lr=1e-4")


def test_a_component_with_a_rate_of_its_own_leaves_the_peak_to_the_groups() -> None:
    params = config(*LLAMA, *OWN_RATE, "training.optimizer.warmup_steps=10")["scheduler"]["params"]
    assert params["warmup_max_lr"] is None
    same = config(*LLAMA, *OWN_RATE, "training.optimizer.warmup_steps=10", "model.components.llm.lr=3e-5")
    assert same["scheduler"]["params"]["warmup_max_lr"] == 3e-5


def test_a_line_without_warm_up_has_one_rate_for_all() -> None:
    with pytest.raises(ConfigError, match="OneCycle, which puts one rate into all parameter groups"):
        config(*LLAMA, *OWN_RATE, "training.optimizer.schedule=linear", "training.optimizer.warmup_steps=0")


def test_a_schedule_that_would_level_the_rates_is_refused() -> None:
    words = [*OWN_RATE, "training.optimizer.warmup_steps=10"]
    with pytest.raises(ConfigError, match=r"Set engine.version=0.19.4 or newer, .*schedule=cosine"):
        config(*LLAMA, *words, "engine.version=0.19.3")
    config(*LLAMA, *words, "engine.version=0.19.3", "training.optimizer.schedule=cosine")


def test_an_engine_of_its_own_has_a_schedule_from_its_own_rate() -> None:
    words = ["recipe=vla70b", "cluster=64xA100", "script=t.py", "training.optimizer.schedule=constant"]
    words += ["training.optimizer.warmup_steps=10", "model.components.projector.lr=1e-3"]
    params = config(*words, name="ds_config.projector.json")["scheduler"]["params"]
    assert params["warmup_max_lr"] == 1e-3


def test_a_bucket_is_no_larger_than_the_gradients() -> None:
    tiny = config("recipe=vla_tiny", "cluster=local", "strategy=zero2")["zero_optimization"]
    assert 0 < tiny["reduce_bucket_size"] < 1_000_000
    assert config(*LLAMA, "strategy=zero2")["zero_optimization"]["reduce_bucket_size"] == 200_000_000


def test_strategies_without_zero_have_no_deepspeed_file() -> None:
    assert "ds_config.json" not in rendered("recipe=vla_tiny", "cluster=local", "strategy=ddp")
