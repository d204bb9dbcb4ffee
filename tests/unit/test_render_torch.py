"""What a script under PyTorch alone is given, and settings that would have no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dslaunch.errors import ConfigError, PlanError
from tests.command import CommandLine
from tests.golden.cases import rendered

LLAMA = ["recipe=llama3_8b", "cluster=64xH100", "script=train.py", "training.global_batch=128"]
TINY = ["recipe=vla_tiny", "cluster=local"]


def test_what_the_script_hands_to_pytorch() -> None:
    files = rendered(*LLAMA, "strategy=fsdp2", "training.micro_batch=1")
    settings = json.loads(files["torch.json"])
    assert settings["mesh"] == {"dp_replicate": 1, "dp_shard": 64}
    assert settings["batch"] == {"global_batch": 128, "micro_batch": 1, "num_microbatches": 2}
    assert "ddp" not in settings
    assert (settings["adamw"]["lr"], settings["clip"]) == (3e-4, 1.0)
    assert yaml.safe_load(files["accelerate.yaml"])["fsdp_config"]["fsdp_version"] == 2


def test_the_rendered_folder_passes_its_own_check(dslaunch: CommandLine, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    assert dslaunch("render", *LLAMA, "strategy=hsdp", "-o", folder).status == 0
    findings = json.loads(dslaunch("check", folder, "--json").out)["findings"]
    assert {finding["severity"] for finding in findings} <= {"info"}


def test_ddp_has_its_settings_and_no_mesh() -> None:
    words = ["strategy=ddp", "script=t.py", "module=", "strategy.ddp.static_graph=true"]
    settings = json.loads(rendered(*TINY, *words)["torch.json"])
    assert settings["ddp"]["static_graph"] is True
    assert settings["ddp"]["bucket_cap_mb"] == 25
    assert "mesh" not in settings


def test_the_runtime_reads_plan_json_alone() -> None:
    assert not {"accelerate.yaml", "torch.json"} & rendered(*TINY, "strategy=ddp").keys()


def test_hsdp_holds_a_copy_of_the_states_in_each_node(dslaunch: CommandLine) -> None:
    def plan(*words: str) -> dict[str, dict[str, float]]:
        found = dslaunch("plan", *LLAMA, *words, "--json").json
        assert found["engine"]["name"] == "torch"
        memory: dict[str, dict[str, float]] = found["components"]["llm"]["stages"][0]
        return memory

    whole = plan("strategy=fsdp2")["memory_gib"]
    node = plan("strategy=hsdp")["memory_gib"]
    assert node["optimizer"] == pytest.approx(8 * whole["optimizer"])
    assert node["weights"] == pytest.approx(8 * whole["weights"])
    assert plan("strategy=hsdp", "strategy.shard=64")["memory_gib"] == whole


def test_gradients_that_are_views_of_the_buckets_take_less(dslaunch: CommandLine) -> None:
    words = ["plan", *TINY, "strategy=ddp", "script=t.py", "module=", "--json"]
    plans = [dslaunch(*words, f"strategy.ddp.gradient_as_bucket_view={on}").json for on in ("false", "true")]
    stage = [p["components"]["llm"]["stages"][0]["memory_gib"]["gradients"] for p in plans]
    assert stage[0] == pytest.approx(2 * stage[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=hsdp", "strategy.shard=24"], "strategy.shard is 24: dp 64 (llm) / 24 = 2.667 is not whole"),
        (["strategy=fsdp2", "strategy.shard=8"], "strategy.sharding fsdp2: hsdp alone reads it"),
        (["strategy=zero3", "strategy.ddp.static_graph=true"], "strategy.ddp is for sharding ddp of engine torch"),
        (["strategy=hsdp", "engine=deepspeed"], "strategy.sharding is hsdp; deepspeed takes zero"),
        (["strategy=ddp", "strategy.ddp.comm_hook=int8"], "Allowed: none, fp16, bf16, power_sgd"),
        (["strategy=hsdp", "script=", "module=dslaunch.runtime"], "dslaunch.runtime does not execute it"),
    ],
)
def test_what_would_have_no_effect_is_refused(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        rendered(*LLAMA, *words)
    assert message in str(caught.value)
